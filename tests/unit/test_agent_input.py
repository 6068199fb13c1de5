"""What is piped in, and the file that the answer goes to."""

import os
import socket
import threading
from pathlib import Path

import pytest

from asp.errors import UsageError
from asp_agent import answer_file
from asp_agent.input import MAX_BYTES, read_piped, with_piped


@pytest.fixture
def pipe() -> "tuple[int, int]":
    reading, writing = os.pipe()
    yield reading, writing  # type: ignore[misc]
    for descriptor in (reading, writing):
        try:
            os.close(descriptor)
        except OSError:
            continue


def test_a_pipe_is_read_to_its_end(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    text = "ä" * (MAX_BYTES // 2)

    def write() -> None:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(writing, data[:1000]) :]
        os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_piped(reading) == text
    writer.join()


def test_a_pipe_that_says_nothing_does_not_hang(pipe: tuple[int, int]) -> None:
    assert read_piped(pipe[0], first_byte_s=0.01) is None
    os.set_blocking(pipe[0], False)
    assert read_piped(pipe[0], first_byte_s=0.01) is None


def test_a_pipe_that_does_not_end_is_named(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"begin")
    with pytest.raises(UsageError, match="began and then said nothing"):
        read_piped(pipe[0], rest_s=0.01)


def test_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(b"x" * (MAX_BYTES + 1))
    with path.open("rb") as opened, pytest.raises(UsageError, match="more than 256 KiB"):
        read_piped(opened.fileno())
    path.write_bytes(b"x" * MAX_BYTES)
    with path.open("rb") as opened:
        assert read_piped(opened.fileno()) == "x" * MAX_BYTES


def test_other_kinds(tmp_path: Path) -> None:
    with open("/dev/null", "rb") as nothing:
        assert read_piped(nothing.fileno()) == ""
    master, slave = os.openpty()
    assert read_piped(slave) == ""
    os.close(master)
    os.close(slave)
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"over a socket\xff")
        theirs.close()
        assert read_piped(ours.fileno()) == "over a socket\ufffd"
    with pytest.raises(UsageError, match="cannot be used"):
        read_piped(987)


def test_the_task_with_what_was_piped_in() -> None:
    assert with_piped("do it", " \n") == "do it"
    assert with_piped("do it", "a\nb\n") == "do it\n\nThis was given along with the task:\n\na\nb\n"


def test_the_answer_file(tmp_path: Path) -> None:
    path = tmp_path / "answer.txt"
    answer_file.check(path)
    assert not path.exists()
    answer_file.write(path, "one")
    path.chmod(0o640)
    answer_file.check(path)
    answer_file.write(path, "zwei \udc80 ü\n")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == ("zwei ? ü\n".encode(), 0o640)
    link = tmp_path / "link"
    link.symlink_to("answer.txt")
    answer_file.check(link)
    answer_file.write(link, "three")
    assert (link.is_symlink(), path.read_text()) == (True, "three\n")
    assert sorted(os.listdir(tmp_path)) == ["answer.txt", "home", "link"], "no temporary file is left"


@pytest.mark.parametrize("name", [".", "missing/x", "x" * 250, "folder", "answer.txt/x", "a\0b", "/dev/null"])
def test_what_cannot_be_an_answer_file_is_refused_before(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "answer.txt").write_text("")
    with pytest.raises(UsageError, match=r"^-o "):
        answer_file.check(tmp_path / name)


def test_a_folder_that_went_away(tmp_path: Path) -> None:
    with pytest.raises(answer_file.AnswerNotWritten, match="cannot write the answer"):
        answer_file.write(tmp_path / "gone" / "x", "text")
