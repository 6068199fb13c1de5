"""Output that was written for a terminal becomes text that is worth a model's tokens (P18 to P21). Pure.

The rule: UTF-8 with U+FFFD for what is not; ANSI sequences removed; of a line that was rewritten with CR only its last
state; no other control character but TAB and LF.
"""

import re

# CSI, OSC (to BEL, ST or the end of the line), DCS/SOS/PM/APC, then any other escape (ECMA-48 5.3-5.6). Each takes
# linear time: nothing nests, and the classes leave no choice.
_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?"
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
    r"|\x1b[PX^_][^\x1b\n]*(?:\x1b\\)?"
    r"|\x1b[ -/]*[0-~]?",
)
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def decode_tail(data: bytes, *, cut: bool) -> str:
    """Decode output. With ``cut`` earlier bytes are missing, so the rest of a first, cut character is dropped."""
    start = 0
    while cut and start < min(3, len(data)) and data[start] & 0xC0 == 0x80:  # noqa: PLR2004 - 10xxxxxx continues a character
        start += 1
    return data[start:].decode("utf-8", "replace")


def clean(text: str) -> str:
    """Return ``text`` as a person would have seen it, line by line."""
    text = _ANSI.sub("", text)
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROLS.sub("", text)
