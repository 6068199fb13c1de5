"""What is killed around a container: the gateway, the command, the engine's answer. Nothing is lost that need not be."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import trusted
from docker_lab import Container, DockerLab, docker
from sandbox_lab import COMMAND, end

from asp.errors import TransportError
from asp.ssh import open_transport

pytestmark = [pytest.mark.docker, pytest.mark.timeout(200)]
WAIT_S = 100


@pytest.fixture
def box(docker_lab: DockerLab, tmp_path: Path) -> Container:
    repository = tmp_path / "repo"
    repository.mkdir()
    return docker_lab.up(repository, "--image", "asp-test-busybox")


async def test_a_killed_gateway_is_replaced_on_the_same_port(box: Container, docker_lab: DockerLab, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    async with open_transport(trusted(box.contract, tmp_path / "c")) as transport:
        await transport.write("kept", b"x")
        gateway = docker_lab.gateway()
        assert gateway is not None
        end(gateway)
        with pytest.raises(TransportError):
            await asyncio.wait_for(transport.exec("true"), WAIT_S)
        (row,) = [row for row in docker_lab.listed() if row["name"] == box.name]
        assert (row["state"], row["port"]) == ("running", box.port)
        assert (await asyncio.wait_for(transport.exec("cat kept"), WAIT_S)).stdout == b"x"
    assert docker_lab.run("down", box.name).returncode == 0


async def test_a_port_that_somebody_took_is_left_to_him(box: Container, docker_lab: DockerLab, tmp_path: Path) -> None:
    gateway = docker_lab.gateway()
    assert gateway is not None
    end(gateway)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", box.port))
        taken.listen()
        done = docker_lab.run("start", box.name)
        assert done.returncode == 0, done.stderr
    fresh = json.loads((box.repository / ".asp.json").read_bytes())
    assert fresh["connection"]["port"] != box.port
    async with open_transport(trusted(fresh, tmp_path)) as transport:
        assert (await transport.exec("echo in")).stdout == b"in\n"
    assert docker_lab.run("down", box.name).returncode == 0
    assert not (box.repository / ".asp.json").exists()


def test_a_container_that_is_gone(box: Container, docker_lab: DockerLab) -> None:
    docker("rm", "-f", box.id)
    pause = threading.Event()
    for _ in range(500):  # the gateway is told by the engine
        (row,) = [row for row in docker_lab.listed() if row["name"] == box.name]
        if row["state"] == "stopped":
            break
        pause.wait(0.1)
    assert row["state"] == "stopped"
    done = docker_lab.run("start", box.name)
    assert (done.returncode, "is gone, and with it what it held" in done.stderr) == (2, True)
    assert docker_lab.run("down", box.name).returncode == 0


def test_up_that_is_killed_at_any_moment_leaves_nothing_after_down(docker_lab: DockerLab, tmp_path: Path) -> None:
    seed = int(os.environ.get("ASP_SEED") or random.SystemRandom().randrange(10**8))
    print(f"ASP_SEED={seed}")
    draw = random.Random(seed)
    for number in range(6):
        repository = tmp_path / f"repo-{number}"
        repository.mkdir()
        started = subprocess.Popen(
            [*COMMAND, "up", "docker", "--image", "asp-test-empty"], cwd=repository, env=docker_lab.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        threading.Event().wait(draw.uniform(0, 1.2))  # the drawn moment, not a wait for anything
        started.send_signal(signal.SIGKILL)
        started.wait(30)
    done = docker_lab.run("down", "--all")
    assert done.returncode == 0, done.stderr
    assert docker("ps", "-aq", "--filter", f"label=asp-sandbox-owner={docker_lab.state}").stdout == b""
    assert docker_lab.listed() == []
