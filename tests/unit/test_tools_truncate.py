"""Truncation: pure, so its invariants are stated for all texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asp_agent.tools.truncate import head, last_bytes, size, split_lines, tail

TEXTS = st.text(alphabet=st.sampled_from("a\n\u00e9\u4e2d\U0001f600\t "), max_size=200)
LIMITS = st.integers(min_value=0, max_value=60)


@given(TEXTS)
def test_lines_are_the_text(text: str) -> None:
    lines = split_lines(text)
    assert "".join(lines) == text
    assert all(line.endswith("\n") for line in lines[:-1])
    assert all(line.count("\n") <= 1 and line for line in lines)


@given(TEXTS, LIMITS, LIMITS)
def test_tail_is_an_end_within_both_limits(text: str, max_lines: int, max_bytes: int) -> None:
    max_lines = max(1, max_lines)
    cut = tail(text, max_lines=max_lines, max_bytes=max_bytes)
    assert text.endswith(cut.text)
    assert size(cut.text) <= max_bytes
    assert len(split_lines(cut.text)) <= max_lines
    assert cut.cut == (cut.text != text)
    whole = split_lines(text)
    if cut.cut and not cut.inside_line and cut.lines < min(max_lines, len(whole)):
        assert size("".join(whole[-cut.lines - 1 :])) > max_bytes, "one more line would have fitted"


@given(TEXTS, LIMITS, LIMITS)
def test_head_is_a_start_of_whole_lines_within_both_limits(text: str, max_lines: int, max_bytes: int) -> None:
    lines = split_lines(text)
    cut = head(lines, max_lines=max_lines, max_bytes=max_bytes)
    assert cut.text == "".join(lines[: cut.lines])
    assert size(cut.text) <= max_bytes
    assert cut.lines <= max_lines
    assert cut.cut == (cut.lines < len(lines))
    if cut.cut and cut.lines < max_lines:
        assert size("".join(lines[: cut.lines + 1])) > max_bytes


@given(st.text(max_size=60), LIMITS)
def test_last_bytes_starts_with_a_whole_character(text: str, limit: int) -> None:
    end = last_bytes(text, limit)
    assert text.endswith(end)
    assert size(end) <= limit
    assert size(end) > limit - 4 or end == text, "at most three bytes of a cut character are lost"


@pytest.mark.parametrize("character", ["\u4e2d", "\U0001f600"])
@pytest.mark.parametrize("more", range(4))
def test_p20_a_cut_inside_a_character_keeps_the_limit(character: str, more: int) -> None:
    text = "x" + character * 200
    cut = tail(text, max_bytes=100 + more)
    assert "\ufffd" not in cut.text
    assert cut.inside_line
    assert 97 + more <= size(cut.text) <= 100 + more
