"""Foreign text is shown, not obeyed (L8)."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asp.errors import FOREIGN_TEXT_LIMIT, quoted
from asp.terminal import printable


@pytest.mark.parametrize(("text", "shown"), [
    ("\x1b[31mred\x1b[0m", "^[[31mred^[[0m"),
    ("\x1b]52;c;ZXZpbA==\x07", "^[]52;c;ZXZpbA==^G"),
    ("\x9b2J", "<U+009B>2J"),
    ("a\u202eb", "a<U+202E>b"),
    ("a\u2066b\u2069", "a<U+2066>b<U+2069>"),
    ("line\r\nnext\ttab\n", "line\nnext\ttab\n"),
    ("over\rwritten", "over^Mwritten"),
    ("\x7f\x00", "^?^@"),
    ("\U000e0041", "<U+E0041>"),
    ("grün 漢字 🙂", "grün 漢字 🙂"),
])
def test_examples(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    for character in printable(text):
        assert character in "\n\t" or unicodedata.category(character) not in {"Cc", "Cs"}
    assert "\n" not in printable(text, newlines=False)


@given(st.text() | st.binary())
def test_quoted_is_one_bounded_line(text: str | bytes) -> None:
    shown = quoted(text)
    assert "\n" not in shown
    assert len(shown) <= FOREIGN_TEXT_LIMIT + 2
