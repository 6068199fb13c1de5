"""Trust: what may be used to connect, who said so, and the store that remembers it (C3)."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asp import hostkey, trust
from asp.contract import CONTRACT_NAME, Contract, find, load, local_user
from asp.errors import ContractInvalid, ContractMissing, ContractUnsafe, ContractUntrusted, UsageError
from asp.trust import TrustedContract

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ3w2nq0m2mYpPq6yV1s9G1dQbqY3nK6k1p9l1m1d8Qz"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep our state in the test's folder and take no contract from the environment; return the store's path."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ASP_CONTRACT", raising=False)
    return tmp_path / "state" / "asp" / "trust.json"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with a contract."""
    folder = tmp_path / "project"
    folder.mkdir()
    write(folder)
    return folder


def write(folder: Path, **connection: object) -> Path:
    path = folder / CONTRACT_NAME
    document = {"version": "0", "transport": "ssh", "connection": {"host": "127.0.0.1", "port": 2222, **connection}}
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return path


# --- the wrapper ---


def test_only_require_makes_a_trusted_contract(project: Path) -> None:
    contract = load(project / CONTRACT_NAME)
    with pytest.raises(TypeError, match=r"asp\.trust\.require"):
        TrustedContract(contract, "named")
    trusted = trust.require(contract, named=True)
    assert trusted.contract is contract
    with pytest.raises(TypeError):
        dataclasses.replace(trusted, contract=contract)
    with pytest.raises(dataclasses.FrozenInstanceError):
        trusted.contract = contract  # type: ignore[misc]
    assert copy.copy(trusted) == trusted


# --- require ---


def test_an_unknown_contract_is_refused_with_the_line_to_type(project: Path) -> None:
    with pytest.raises(ContractUntrusted) as caught:
        trust.require(load(project / CONTRACT_NAME), named=False)
    assert str(caught.value).endswith(f"type: asp trust {project / CONTRACT_NAME}")
    assert "127.0.0.1:2222" in str(caught.value)


def test_the_line_to_type_is_quoted_for_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "it's; touch x \x1b[0m"
    folder.mkdir()
    with pytest.raises(ContractUntrusted) as caught:
        trust.require(load(write(folder)), named=False)
    assert """/it'"'"'s; touch x ^[[0m/.asp.json'""" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_remember_and_forget(project: Path) -> None:
    contract = load(project / CONTRACT_NAME)
    assert not trust.is_remembered(contract)
    trust.remember(contract)
    assert trust.is_remembered(contract)
    assert trust.require(contract, named=False).how == "remembered"
    assert trust.forget(project / CONTRACT_NAME) is True
    assert trust.forget(project / CONTRACT_NAME) is False
    with pytest.raises(ContractUntrusted):
        trust.require(contract, named=False)


def test_one_changed_byte_ends_the_trust(project: Path) -> None:
    path = project / CONTRACT_NAME
    trust.remember(load(path))
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ContractUntrusted, match="has changed since it was trusted"):
        trust.require(load(path), named=False)
    trust.remember(load(path))
    assert trust.require(load(path), named=False).how == "remembered"


def test_the_same_bytes_elsewhere_are_not_trusted(project: Path, tmp_path: Path) -> None:
    trust.remember(load(project / CONTRACT_NAME))
    with pytest.raises(ContractUntrusted):
        trust.require(load(write(tmp_path)), named=False)


def test_forget_works_when_the_file_is_gone(project: Path) -> None:
    path = project / CONTRACT_NAME
    trust.remember(load(path))
    path.unlink()
    assert trust.forget(path) is True


# --- resolve: option, variable, walking up ---


def test_the_road(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("option", "variable"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, user=name)
    deep = project / "deep"
    deep.mkdir()

    with pytest.raises(ContractUntrusted):
        trust.resolve(None, deep)
    trust.remember(load(project / CONTRACT_NAME))
    assert trust.resolve(None, deep).contract.path == project / CONTRACT_NAME

    monkeypatch.setenv("ASP_CONTRACT", "")
    assert trust.resolve(None, deep).how == "remembered"
    monkeypatch.setenv("ASP_CONTRACT", str(tmp_path / "variable"))
    assert trust.resolve(None, deep).contract.user == "variable"
    found = trust.resolve("../../option", deep)
    assert (found.contract.user, found.how) == ("option", "named")


def test_a_named_folder_is_not_walked_up(project: Path) -> None:
    (project / "deep").mkdir()
    with pytest.raises(ContractMissing):
        trust.resolve("deep", project)


def test_a_named_file_is_checked_like_every_other(project: Path) -> None:
    path = project / CONTRACT_NAME
    path.chmod(0o666)
    with pytest.raises(ContractUnsafe):
        trust.resolve(str(path), project)
    path.chmod(0o600)
    path.write_text("{}")
    with pytest.raises(ContractInvalid):
        trust.resolve(str(path), project)


@pytest.mark.parametrize("option", ["", "a\0b", "x" * 5000])
def test_impossible_options(option: str, project: Path) -> None:
    with pytest.raises((UsageError, ContractUnsafe)):
        trust.resolve(option, project)


# --- the store ---


def test_the_store_is_private_and_readable(project: Path, state: Path) -> None:
    contract = load(project / CONTRACT_NAME)
    trust.remember(contract)
    assert json.loads(state.read_bytes()) == {str(contract.path): contract.digest}
    assert state.stat().st_mode & 0o777 == 0o600
    assert state.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in state.parent.iterdir()) == ["trust.json", "trust.lock"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"/x": 1}', b'{"/x": "abc"}', b"\xff", b"[" * 100_000],
    ids=range(8),
)
def test_a_damaged_store_is_one_line_and_is_not_wiped(content: bytes, project: Path, state: Path) -> None:
    state.parent.mkdir(parents=True)
    state.write_bytes(content)
    contract = load(project / CONTRACT_NAME)
    for use in (trust.remember, trust.is_remembered, lambda contract: trust.forget(contract.path)):
        with pytest.raises(UsageError, match="is damaged; type: mv ") as caught:
            use(contract)
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UsageError):
        trust.require(contract, named=False)
    assert trust.require(contract, named=True).how == "named"
    assert state.read_bytes() == content


def test_a_store_that_is_a_directory(project: Path, state: Path) -> None:
    state.mkdir(parents=True)
    with pytest.raises(UsageError, match="cannot be read"):
        trust.remember(load(project / CONTRACT_NAME))


def test_a_lock_that_is_a_link_is_refused(project: Path, state: Path, tmp_path: Path) -> None:
    state.parent.mkdir(parents=True)
    (state.parent / "trust.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot be written"):
        trust.remember(load(project / CONTRACT_NAME))
    assert not (tmp_path / "elsewhere").exists()


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path, state: Path) -> None:
    """Without the lock, read-change-write of one process drops what another wrote in between."""
    script = (
        "import sys; from pathlib import Path; from asp.contract import Contract; from asp import trust\n"
        "for number in range(20): trust.remember(Contract(Path(f'/{sys.argv[1]}/{number}'), '0' * 64, 'h'))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(number)], cwd=tmp_path) for number in range(4)]
    assert [writer.wait(30) for writer in writers] == [0] * 4
    assert len(json.loads(state.read_bytes())) == 80


def test_a_path_that_is_not_utf8_is_remembered(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    contract = load(write(folder))
    trust.remember(contract)
    assert trust.is_remembered(contract)
    trust.describe(contract).encode()


# --- what a person sees ---


def test_describe_shows_where_it_leads(project: Path) -> None:
    path = write(project, host="::1", user="root", identity={"file": "../keys/id"}, host_key=KEY)
    assert trust.describe(load(path)).splitlines() == [
        f"contract:  {path}",
        "host:      [::1]:2222  (this machine)",
        "user:      root",
        f"identity:  the key file {project}/../keys/id",
        "host key:  ssh-ed25519 SHA256:" + hostkey.parse(KEY).fingerprint().removeprefix("SHA256:"),
        "workspace: /",
    ]


def test_describe_of_what_is_absent_or_secret(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASP_KEY", "SECRET-VALUE")
    path = write(project, host="sandbox.example", user="tok_SECRET123", identity={"env": "ASP_KEY"})
    text = trust.describe(load(path))
    assert "SECRET" not in text
    assert "user:      (a token, not shown)" in text
    assert "identity:  the key in the variable ASP_KEY" in text
    assert "host key:  none" in text
    assert "this machine" not in text
    text = trust.describe(load(write(project)))
    assert "identity:  none, no key is offered" in text
    assert f"user:      {local_user()}  (your local account's name)" in text


def test_describe_is_safe_for_a_terminal() -> None:
    contract = Contract(Path("/a\x1b[2J\n\u202eb"), "0" * 64, "h", user="root\x1b")
    text = trust.describe(contract)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize("answer", ["y", "Y", " yes\n"])
def test_a_yes_on_the_terminal_is_remembered(answer: str, project: Path) -> None:
    asked: list[str] = []

    def ask(text: str) -> str:
        asked.append(text)
        return answer

    contract = load(find(project))
    assert trust.confirm_on_terminal(contract, ask).contract == contract
    assert asked[0].startswith(trust.describe(contract))
    assert trust.confirm_on_terminal(contract, lambda text: pytest.fail(f"asked again: {text}")).how == "remembered"


@pytest.mark.parametrize("answer", ["", "n", "yeah", "Yo"])
def test_all_else_is_a_no(answer: str, project: Path) -> None:
    contract = load(find(project))
    with pytest.raises(ContractUntrusted):
        trust.confirm_on_terminal(contract, lambda _: answer)
    assert not trust.is_remembered(contract)


def test_the_end_of_input_is_a_no(project: Path) -> None:
    def ask(_: str) -> str:
        raise EOFError

    with pytest.raises(ContractUntrusted):
        trust.confirm_on_terminal(load(find(project)), ask)
