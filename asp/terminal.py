"""Show text that somebody else wrote without obeying it (DESIGN L8).

A terminal acts on control characters: ESC sequences move the cursor, set the clipboard and the title; C1 controls are
the same in one byte; bidi controls reorder what is read ("Trojan Source", CVE-2021-42574). All foreign text (model text,
tool output, diffs, file names, banners, contract fields) goes through :func:`printable` before it reaches a terminal.
"""

import re

# C0 without TAB and LF, DEL, C1, the Unicode bidi controls, line/paragraph separators, zero-width and tag characters.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]",
)
_LINE_BREAKS = re.compile("[\n\t]")


def _show(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:  # noqa: PLR2004 - C0, shown in caret notation as cat -v does
        return "^" + chr(code + 0x40)
    if code == 0x7F:  # noqa: PLR2004 - DEL
        return "^?"
    return f"<U+{code:04X}>"


def printable(text: str, *, newlines: bool = True) -> str:
    """Return ``text`` with every character that a terminal would obey shown instead: ESC as ``^[``, U+202E as ``<U+202E>``.

    TAB and LF pass unless ``newlines`` is false; then they are shown as ``^I`` and ``^J``, so the result is one line.
    A CR directly before LF is dropped, since it changes nothing on the screen.
    """
    if newlines:
        return _OBEYED.sub(_show, text.replace("\r\n", "\n"))
    return _LINE_BREAKS.sub(_show, _OBEYED.sub(_show, text))
