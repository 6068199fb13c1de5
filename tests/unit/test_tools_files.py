"""read, write and edit over a real directory."""

import os
from pathlib import Path

import pytest
from agent_parts import use

from asp.testing import LocalTwin
from asp_agent.redact import MARK, Redactor
from asp_agent.tools.edit import EditRefused, replace
from asp_agent.tools.truncate import MAX_BYTES, size


@pytest.fixture
def twin(tmp_path: Path) -> LocalTwin:
    (tmp_path / "work").mkdir()
    return LocalTwin(tmp_path / "work")


@pytest.fixture
def work(twin: LocalTwin) -> Path:
    return Path(twin.workspace)


# read


async def test_a_whole_file_is_its_text(twin: LocalTwin, work: Path) -> None:
    (work / "a").write_bytes(b"one\n\ttwo\r\nthree")
    assert (await use(twin, "read", path="a")).content == "one\n\ttwo\r\nthree"


async def test_pages(twin: LocalTwin, work: Path) -> None:
    (work / "a").write_text("".join(f"line {n}\n" for n in range(1, 2501)))
    first = (await use(twin, "read", path="a")).content
    assert first.startswith("line 1\n")
    assert first.endswith("line 2000\n\n[Lines 1-2000 of 2500. Continue with offset=2001.]")
    second = (await use(twin, "read", path="a", offset=2001)).content
    assert second == "".join(f"line {n}\n" for n in range(2001, 2501))
    middle = (await use(twin, "read", path="a", offset=3, limit=2)).content
    assert middle == "line 3\nline 4\n\n[Lines 3-4 of 2500. Continue with offset=5.]"


async def test_exactly_the_limit_is_not_cut(twin: LocalTwin, work: Path) -> None:
    (work / "a").write_text("x\n" * 2000)
    assert (await use(twin, "read", path="a")).content == "x\n" * 2000


async def test_the_byte_limit_ends_after_a_whole_line(twin: LocalTwin, work: Path) -> None:
    (work / "a").write_text(("\u4e2d" * 300 + "\n") * 100)
    content = (await use(twin, "read", path="a")).content
    text, _, note = content.rpartition("\n\n[")
    assert size(text) <= MAX_BYTES
    assert note == "Lines 1-56 of 100. Continue with offset=57.]"
    assert "\ufffd" not in text


async def test_p83_empty_and_blank_files(twin: LocalTwin, work: Path) -> None:
    (work / "empty").touch()
    (work / "blank").write_text("\n\n")
    assert (await use(twin, "read", path="empty")).content == "(empty file)"
    assert (await use(twin, "read", path="blank")).content == "\n\n\n[Only whitespace.]"
    assert (await use(twin, "read", path="empty", offset=2)).is_error


async def test_offset_beyond_the_end_is_an_error(twin: LocalTwin, work: Path) -> None:
    (work / "a").write_text("1\n2\n3\n")
    produced = await use(twin, "read", path="a", offset=4)
    assert produced.is_error
    assert produced.content == "a has 3 lines; line 4 is beyond its end."


async def test_p82_one_long_line_and_binary(twin: LocalTwin, work: Path) -> None:
    (work / "min.js").write_text("ab" * 2_500_000)
    content = (await use(twin, "read", path="min.js")).content
    assert content.startswith("ab" * 1000 + "\n\n[Line 1 of 1 is 5,000,000 bytes long")
    assert len(content) < 2500
    (work / "bin").write_bytes(b"\x7fELF\0\0" + bytes(1000))
    produced = await use(twin, "read", path="bin")
    assert produced.is_error
    assert produced.content.startswith("bin is a binary file (1,006 bytes)")


async def test_the_hint_for_a_long_line_is_a_command_that_works_whatever_the_name(twin: LocalTwin, work: Path) -> None:
    name = "-a '; touch pwn; #"
    (work / name).write_text("first\n" + "0123456789" * 10_000 + "\nlast\n")
    content = (await use(twin, "read", path=name, offset=2)).content
    command = content.partition("use bash: ")[2].partition(". Lines after")[0]
    produced = await use(twin, "bash", command=command)
    assert produced.content == "0123456789" * 200 + "\n"
    assert [path.name for path in work.iterdir()] == [name]


async def test_a_file_beyond_the_scan_limit_says_more_than(twin: LocalTwin, work: Path) -> None:
    with (work / "big").open("wb") as file:
        file.writelines(b"%07d\n" % n for n in range(3_000_000))
    content = (await use(twin, "read", path="big")).content
    assert content.endswith("[Lines 1-2000 of more than 2097152. Continue with offset=2001.]")
    produced = await use(twin, "read", path="big", offset=2_500_000)
    assert produced.is_error
    assert "Only the first 16 MiB" in produced.content


async def test_p18_invalid_utf8_is_shown_with_replacements(twin: LocalTwin, work: Path) -> None:
    (work / "a").write_bytes(b"ab\377\376\n")
    assert (await use(twin, "read", path="a")).content == "ab\ufffd\ufffd\n"


async def test_p42_five_faults_five_texts(twin: LocalTwin, work: Path) -> None:
    (work / "dir").mkdir()
    (work / "file").write_text("x")
    (work / "loop").symlink_to("loop")
    os.mkfifo(work / "fifo")
    texts = [(await use(twin, "read", path=path)).content for path in ("none", "dir", "loop", "file/x", "fifo")]
    assert texts == [
        "none: no such file or directory",
        "dir: is a directory",
        "loop: too many levels of symbolic links",
        "file/x: not a directory",
        "fifo: not a regular file (a FIFO, device or socket)",
    ]


@pytest.mark.parametrize("path", ["'; touch pwn; #", "$(touch pwn)", "~/x", "@x", "`touch pwn`"])
async def test_p24_a_path_is_never_code_and_never_expanded(twin: LocalTwin, work: Path, path: str) -> None:
    assert (await use(twin, "read", path=path)).content == f"{path}: no such file or directory"
    assert not (await use(twin, "write", path=path, content="one\n")).is_error
    assert not (await use(twin, "edit", path=path, edits=[{"oldText": "one", "newText": "two"}])).is_error
    assert (work / path).read_text() == "two\n"
    assert not (work / "pwn").exists()


async def test_nul_in_a_path(twin: LocalTwin) -> None:
    for name, more in (
        ("read", {}),
        ("write", {"content": ""}),
        ("edit", {"edits": [{"oldText": "a", "newText": "b"}]}),
    ):
        produced = await use(twin, name, path="a\0b", **more)
        assert produced.is_error
        assert "NUL" in produced.content


async def test_a_secret_in_a_file_is_redacted_before_it_is_cut(twin: LocalTwin, work: Path) -> None:
    secret = "sk-" + "s" * 40
    (work / "a").write_text(f"x={secret}\n" + "y" * (MAX_BYTES - 20) + "\n" + "z" * 100 + secret)
    content = (await use(twin, "read", path="a", redact=Redactor([secret]))).content
    assert content.startswith(f"x={MARK}\n")
    assert "sssss" not in content


async def test_key_text_keeps_its_line_numbers(twin: LocalTwin, work: Path) -> None:
    key = "-----BEGIN X-----\n" + "A" * 64 + "\n" + "B" * 64 + "\n-----END X-----"
    (work / "a").write_text(f"before\n{key}\nafter\n")
    assert (await use(twin, "read", path="a", offset=6, redact=Redactor([key]))).content == "after\n"


# write


async def test_write(twin: LocalTwin, work: Path) -> None:
    assert (await use(twin, "write", path="deep/er/a", content="\u4e2d\n")).content == "Wrote 4 bytes to deep/er/a."
    assert (work / "deep/er/a").read_bytes() == b"\xe4\xb8\xad\n"
    assert (await use(twin, "write", path="deep/er/a", content="")).content == "Wrote 0 bytes to deep/er/a."
    assert (work / "deep/er/a").read_bytes() == b""
    assert (await use(twin, "write", path="deep", content="x")).content == "deep: is a directory"


# edit, the pure part


def test_p77_crlf_is_matched_by_lf_and_kept() -> None:
    body = b"a\r\nb\r\nc\r\nd\r\n"
    assert replace(body, [("b\nc", "B\nnew\nC")]) == b"a\r\nB\r\nnew\r\nC\r\nd\r\n"
    assert replace(body, [("b", "b1\nb2")]) == b"a\r\nb1\r\nb2\r\nc\r\nd\r\n", "one line becomes two: the new one too"
    assert replace(b"a\r\nb", [("b", "b\nc")]) == b"a\r\nb\r\nc", "a last line without ending goes by the one before"
    assert replace(b"a\nb\r\nc\n", [("a", "a\na2"), ("b\nc", "b\nx\nc")]) == b"a\na2\nb\r\nx\r\nc\n", "mixed files stay mixed"
    assert replace(b"a\r\nb\r\n", [("a\r\nb", "x\r\ny")]) == b"x\r\ny\r\n"
    assert replace(b"a\nb\n", [("a", "x\r\ny")]) == b"x\r\ny\nb\n", "what is explicit is taken literally"


def test_p78_not_unique_counts_overlapping_ones() -> None:
    for body, old, count in (
        (b"x y x y x", "x", "3 times"),
        (b"aaa", "aa", "2 times"),
        (b"a" * 5000, "a", "more than 1000"),
    ):
        with pytest.raises(EditRefused, match=count):
            replace(body, [(old, "z")])


@pytest.mark.parametrize("new", ["$&", "$1", r"\1", r"\g<0>", r"\n", "{0}", "%s", "\\", "&"])
def test_p79_new_text_is_literal(new: str) -> None:
    assert replace(b"a [x] b", [("[x]", new)]) == b"a " + new.encode() + b" b"


def test_p81_bom_and_final_newline() -> None:
    body = b"\xef\xbb\xbffirst\r\nlast"
    assert replace(body, [("first", "FIRST")]) == b"\xef\xbb\xbfFIRST\r\nlast"
    assert replace(body, [("\ufefffirst", "\ufeffFIRST")]) == b"\xef\xbb\xbfFIRST\r\nlast"
    assert replace(body, [("\ufefffirst", "FIRST")]) == b"\xef\xbb\xbfFIRST\r\nlast"
    assert replace(body, [("last", "LAST")]) == b"\xef\xbb\xbffirst\r\nLAST"


def test_invalid_bytes_elsewhere_are_untouched() -> None:
    assert replace(b"\xff\xfe a \x80", [("a", "b")]) == b"\xff\xfe b \x80"
    with pytest.raises(EditRefused, match="not UTF-8"):
        replace(b"x\xff", [("x\ufffd", "y")])


def test_several_edits_match_the_original() -> None:
    assert replace(b"a b c", [("c", "a"), ("a", "b"), ("b", "c")]) == b"b c a"
    with pytest.raises(EditRefused, match="edits 1 and 2 overlap"):
        replace(b"abcd", [("bcd", "x"), ("abc", "y")])
    assert replace(b"abcd", [("cd", "y"), ("ab", "x")]) == b"xy", "touching is not overlapping"


@pytest.mark.parametrize(
    ("old", "new", "words"), [("nope", "x", "was not found"), ("a", "a", "equals the old"), ("\ufeff", "x", "is empty")]
)
def test_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(EditRefused, match=words):
        replace(b"a b", [(old, new)])


# edit: the tool


async def test_edit_leaves_the_file_alone_when_one_edit_fails(twin: LocalTwin, work: Path) -> None:
    (work / "a").write_text("one two\n")
    before = (work / "a").stat()
    produced = await use(twin, "edit", path="a", edits=[{"oldText": "one", "newText": "1"}, {"oldText": "three", "newText": "3"}])
    assert produced.is_error
    assert produced.content.startswith("a was not changed: oldText of edit 2 was not found.")
    assert ((work / "a").stat().st_mtime_ns, (work / "a").read_text()) == (before.st_mtime_ns, "one two\n")


async def test_edit_of_a_tab_indented_line_as_read(twin: LocalTwin, work: Path) -> None:
    (work / "a").write_text("if x:\n\treturn 1\n")
    shown = (await use(twin, "read", path="a", offset=2)).content
    produced = await use(twin, "edit", path="a", edits=[{"oldText": shown, "newText": "\treturn 2\n"}])
    assert produced.content == "Made 1 replacement in a."
    assert (work / "a").read_text() == "if x:\n\treturn 2\n"


async def test_edit_of_a_missing_file(twin: LocalTwin) -> None:
    produced = await use(twin, "edit", path="none", edits=[{"oldText": "a", "newText": "b"}])
    assert (produced.content, produced.is_error) == ("none: no such file or directory", True)
