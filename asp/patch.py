"""Two trees in, one patch out, in git's format. Pure; every name and byte in it is taken for hostile (S7)."""

import base64
import difflib
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asp.errors import AspError

LONGEST_COMPARED = 512 << 10
"""Bytes of a file above which it is replaced whole instead of compared: difflib is quadratic at worst, and the input is the
sandbox's."""

LONGEST_PATCH = 1 << 30
"""Bytes of a patch. A tree is bounded before, but one content under many names (hard links) is not."""

_NAME_ESCAPES = {ord("\n"): b"\\n", ord("\t"): b"\\t", ord('"'): b'\\"', ord("\\"): b"\\\\"}


class PatchTooLarge(AspError):
    """The changes are more than anyone can read or apply."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: ``link`` is the target if it is a symbolic link, else ``content`` counts."""

    content: bytes = b""
    executable: bool = False
    link: bytes | None = None

    @property
    def mode(self) -> bytes:
        """The mode as git writes it."""
        if self.link is not None:
            return b"120000"
        return b"100755" if self.executable else b"100644"

    @property
    def blob(self) -> bytes:
        """What git would compare: the content, or where the link points."""
        return self.content if self.link is None else self.link


def git_name(prefix: bytes, name: bytes) -> bytes:
    """Return a name as git prints it: in C quotes if it holds control, quote or non-ASCII bytes (core.quotePath)."""
    full = prefix + name
    if all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in full):  # noqa: PLR2004 - printable ASCII
        return full
    quoted = b"".join(
        _NAME_ESCAPES.get(byte) or (bytes([byte]) if 0x20 <= byte < 0x7F else b"\\%03o" % byte)  # noqa: PLR2004
        for byte in full
    )
    return b'"' + quoted + b'"'


def _split(blob: bytes) -> list[bytes]:
    """Split at LF only; what splitlines() also takes for a line end is content."""
    parts = blob.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    if parts[-1]:
        lines.append(parts[-1])
    return lines


def _is_text(blob: bytes) -> bool:
    return b"\0" not in blob[:8000]  # git's own test (buffer_is_binary)


MOST_COMPARISONS = 4_000_000
"""Lines times lines that differ, above which a file is replaced whole instead of compared: some seconds of difflib."""


def _replaced(before: list[str], after: list[str]) -> Iterator[str]:
    """Yield a unified diff of one hunk that takes all of ``before`` away: longer than need be, valid, and linear."""

    def span(lines: list[str]) -> str:
        return f"{1 if lines else 0},{len(lines)}"

    yield from ("---", "+++", f"@@ -{span(before)} +{span(after)} @@\n")
    yield from (f"-{line}" for line in before)
    yield from (f"+{line}" for line in after)


def _compared(before: list[str], after: list[str]) -> Iterator[str]:
    """Yield a unified diff, in time that the sandbox cannot choose."""
    same = next((n for n, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), min(len(before), len(after)))
    tail = 0
    while tail < min(len(before), len(after)) - same and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    large = sum(map(len, before)) + sum(map(len, after)) > 2 * LONGEST_COMPARED
    if large or (len(before) - same - tail) * (len(after) - same - tail) > MOST_COMPARISONS:
        return _replaced(before, after)
    return difflib.unified_diff(before, after, n=3, lineterm="\n")


def _hunks(old: bytes, new: bytes, old_name: bytes, new_name: bytes) -> Iterator[bytes]:
    # latin-1 maps bytes to characters one to one, so difflib's text functions work on bytes unharmed.
    before = [line.decode("latin-1") for line in _split(old)]
    after = [line.decode("latin-1") for line in _split(new)]
    for number, line in enumerate(_compared(before, after)):
        if number == 0:
            yield b"--- " + old_name + b"\n"
        elif number == 1:
            yield b"+++ " + new_name + b"\n"
        elif line.endswith("\n"):
            yield line.encode("latin-1")
        else:
            yield line.encode("latin-1") + b"\n\\ No newline at end of file\n"


def _file_patch(name: bytes, old: Entry | None, new: Entry | None) -> Iterator[bytes]:
    yield b"diff --git " + git_name(b"a/", name) + b" " + git_name(b"b/", name) + b"\n"
    if old is None and new is not None:
        yield b"new file mode " + new.mode + b"\n"
    elif new is None and old is not None:
        yield b"deleted file mode " + old.mode + b"\n"
    elif old is not None and new is not None and old.mode != new.mode:
        yield b"old mode " + old.mode + b"\nnew mode " + new.mode + b"\n"
    before, after = old.blob if old is not None else b"", new.blob if new is not None else b""
    if before == after:
        return
    if not (_is_text(before) and _is_text(after)):
        mode = b" " + new.mode if old is not None and new is not None and old.mode == new.mode else b""
        yield b"index " + _blob_name(old) + b".." + _blob_name(new) + mode + b"\nGIT binary patch\n"
        yield from _literal(after)
        yield from _literal(before)
        return
    old_name = git_name(b"a/", name) if old is not None else b"/dev/null"
    new_name = git_name(b"b/", name) if new is not None else b"/dev/null"
    yield from _hunks(before, after, old_name, new_name)


def _blob_name(entry: Entry | None) -> bytes:
    """Return git's name of a content (SHA-1 of header and bytes): git checks a binary patch by it."""
    if entry is None:
        return b"0" * 40
    header = b"blob %d\0" % len(entry.blob)
    return hashlib.sha1(header + entry.blob, usedforsecurity=False).hexdigest().encode()


def _literal(blob: bytes) -> Iterator[bytes]:
    """Yield a content as ``git diff --binary`` writes it: zlib, then lines of at most 52 bytes in base 85.

    A line begins with its length (A-Z: 1 to 26, a-z: 27 to 52); git's alphabet is that of RFC 1924.
    """
    yield b"literal %d\n" % len(blob)
    packed = zlib.compress(blob)
    for start in range(0, len(packed), 52):
        piece = packed[start : start + 52]
        length = len(piece) + (ord("A") - 1 if len(piece) <= 26 else ord("a") - 27)  # noqa: PLR2004 - letters
        yield bytes([length]) + base64.b85encode(piece, pad=True) + b"\n"
    yield b"\n"


def patch(old: Mapping[bytes, Entry], new: Mapping[bytes, Entry]) -> bytes:
    """Return what leads from ``old`` to ``new``, names sorted by bytes; empty if nothing changed. ``git apply`` takes it.

    A link that becomes a file, or the other way, is a deletion and a new file, as git writes it. Contents with NUL are a
    binary patch. Raises PatchTooLarge.
    """
    pieces: list[bytes] = []
    size = 0
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if before is not None and after is not None and (before.link is None) != (after.link is None):
            pieces += _file_patch(name, before, None)
            pieces += _file_patch(name, None, after)
        else:
            pieces += _file_patch(name, before, after)
        size += sum(len(entry.blob) for entry in (before, after) if entry is not None)
        if size > LONGEST_PATCH:
            raise PatchTooLarge(f"the changes are larger than {LONGEST_PATCH >> 30} GiB")
    return b"".join(pieces)
