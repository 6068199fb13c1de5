"""The terminal under a run: widths, figures, and redaction of text that comes in pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asp_agent import figures
from asp_agent.messages import Usage
from asp_agent.redact import Redactor, StreamRedactor
from asp_agent.screen import cut


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("short", 20, "short"), ("x" * 20, 20, "x" * 20), ("x" * 21, 20, "x" * 19 + "…"),
        ("日本語日本語", 12, "日本語日本語"), ("日本語日本語", 11, "日本語日本…"), ("日本語日本語", 6, "日本…"),
        ("e\u0301" * 20, 20, "e\u0301" * 20), ("", 20, ""),
    ],
)  # fmt: skip
def test_cut(text: str, columns: int, shown: str) -> None:
    assert cut(text, columns) == shown


def test_figures() -> None:
    assert [figures.tokens(count) for count in (0, 999, 1000, 12_345, 999_949, 999_950, 1_234_567)] == [
        "0", "999", "1.0k", "12.3k", "999.9k", "1.00M", "1.23M",
    ]  # fmt: skip
    assert [figures.money(usd) for usd in (0, 0.0042, 0.01, 12.345)] == ["$0.00", "$0.0042", "$0.01", "$12.35"]
    assert [figures.seconds(s) for s in (0, 3.21, 59.94, 75, 3599.6, 3725)] == [
        "0.0 s",
        "3.2 s",
        "59.9 s",
        "1:15",
        "1:00:00",
        "1:02:05",
    ]
    assert figures.usage(Usage()) == "tokens unknown"
    assert figures.usage(Usage(None, None, None, 5)) == "? in, 5 out"
    assert figures.usage(Usage(1000, 800, None, 5)) == "1.0k in (80% cached), 5 out"


SECRETS = ("sk-12345678", "12345678-abc", "k" * 10 + "\n" + "l" * 40)


@given(st.lists(st.sampled_from([*SECRETS, *"sk-1k\n", "l" * 39, "12345678", "text "]), max_size=12), st.data())
def test_pieces_are_redacted_as_the_whole_is(parts: list[str], data: st.DataObject) -> None:
    text, redact = "".join(parts), Redactor(SECRETS)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stream = StreamRedactor(redact)
    shown = [stream(text[one:two]) for one, two in itertools.pairwise([0, *cuts, len(text)])] + [stream.rest()]
    for secret in SECRETS:
        assert secret not in "".join(shown)
    if not any(secret in text for secret in SECRETS):
        assert "".join(shown) == redact(text)


def test_nothing_is_held_back_that_cannot_be_a_value() -> None:
    stream = StreamRedactor(Redactor(["sk-12345678"]))
    assert [stream("plain "), stream("text s"), stream("k-123"), stream("x"), stream("sk-1"), stream.rest()] == [
        "plain ", "text ", "", "sk-123x", "", "sk-1",
    ]  # fmt: skip
