"""What a run costs, when it has cost enough, and when it goes round in circles."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asp.errors import UsageError
from asp_agent.messages import ToolCall, Usage
from asp_agent.meter import Meter, add_usage
from asp_agent.pricing import known_price, parse_price
from asp_agent.repeats import HINT_AT, STOP_AT, WINDOW, Repeat, Repeats

MILLION = 1_000_000


@pytest.mark.parametrize(
    ("text", "usage", "cost"),
    [
        ("3,15", Usage(MILLION, None, None, MILLION), "18"),
        ("3,15", Usage(MILLION, MILLION, None, 0), "3"),
        ("3,15,0.3", Usage(MILLION, MILLION // 2, None, 0), "1.65"),
        ("3, 15, 0.3, 3.75", Usage(MILLION, 0, MILLION, 0), "3.75"),
        ("0,0", Usage(5, None, None, 5), "0"),
        ("3,15,0.3", Usage(10, 20, None, 0), "0.000006"),  # an API that counts cached tokens apart: never below nothing
    ],
)
def test_a_given_price(text: str, usage: Usage, cost: str) -> None:
    assert parse_price(text)(usage) == Decimal(cost)


@pytest.mark.parametrize("text", ["", "3", "3,", "3,15,1,1,1", "-3,15", "3,1e3", "nan,1", "3;15", "3,15,", "12345678,1", "٣,1"])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--price is INPUT,OUTPUT"):
        parse_price(text)


def test_unknown_is_never_nothing() -> None:
    price = parse_price("3,15")
    assert price(Usage(5, None, None, None)) is None
    assert price(Usage(None, None, None, 5)) is None
    meter = Meter(price)
    assert meter.cost_usd is None, "nothing was asked yet"
    meter.add(Usage(MILLION, None, None, 0))
    assert meter.cost_usd == 3
    meter.add(Usage())
    assert meter.cost_usd is None
    unpriced = Meter()
    unpriced.add(Usage(1, None, None, 1))
    assert unpriced.cost_usd is None


def test_the_list_price_of_known_models() -> None:
    for model in ("anthropic/claude-sonnet-5-5", "openai/gpt-5", "openai-chat/gpt-5"):
        price = known_price(model, None)
        assert price is not None, model
        plain, cached = price(Usage(MILLION, 0, 0, 0)), price(Usage(MILLION, MILLION, 0, 0))
        assert plain is not None
        assert cached is not None
        assert 0 < cached < plain
        assert price(Usage(None, None, None, 1)) is None
    for model, url in (
        ("anthropic/nobody-knows-it", None), ("scripted/x.json", None), ("openai-chat/gpt-5", "http://127.0.0.1:1/v1"),
    ):  # fmt: skip
        assert known_price(model, url) is None, model


def test_a_budget_without_a_price_cannot_start() -> None:
    with pytest.raises(UsageError, match="--price"):
        Meter(None, Decimal(1))


def test_the_caps() -> None:
    meter = Meter(parse_price("1,1"), Decimal("0.5"), 900_000)
    assert meter.over() is None
    meter.add(Usage(400_000, None, None, 99_999))
    assert meter.over() is None
    meter.add(Usage(1, None, None, 0))
    assert meter.over() == ("max_budget_usd", "the budget of $0.5 is used up ($0.5000)")
    tokens = Meter(None, None, 10)
    tokens.add(Usage(4, 4, None, 5))
    assert tokens.over() is None
    tokens.add(Usage(1, None, None, 0))
    assert tokens.over() == ("max_tokens_total", "the limit of 10 tokens was reached (10)")


def test_what_cannot_be_counted_ends_a_run_with_a_cap() -> None:
    dollars, tokens, free = Meter(parse_price("1,1"), Decimal(1)), Meter(None, None, 10), Meter()
    for meter in (dollars, tokens, free):
        meter.add(Usage(1, None, None, None))
    assert [(meter.over() or [None])[0] for meter in (dollars, tokens, free)] == ["cost_unknown", "tokens_unknown", None]


def test_adding() -> None:
    assert add_usage(Usage(1, None, 2, None), Usage(3, None, None, 4)) == Usage(4, None, 2, 4)


def call(arguments: str = '{"command": "ls"}', name: str = "bash") -> ToolCall:
    return ToolCall("c", name, arguments)


def test_repeats() -> None:
    repeats = Repeats()
    said = [repeats.note(call(), "x") for _ in range(STOP_AT)]
    assert said == [Repeat.NEW] * (HINT_AT - 1) + [Repeat.HINT] * (STOP_AT - HINT_AT) + [Repeat.STOP]
    assert "6 times" in repeats.hint()


def test_a_circle_of_two_is_a_circle() -> None:
    repeats = Repeats()
    said = [repeats.note(call(f'{{"command": "{n % 2}"}}'), "x") for n in range(2 * STOP_AT)]
    assert said[-1] is Repeat.STOP
    assert said[2 * HINT_AT - 1] is Repeat.HINT


def test_spaces_and_order_make_no_other_call() -> None:
    repeats = Repeats()
    for text in ('{"a": 1, "b": 2}', '{"b":2,"a":1}', '{ "a":1,"b":2 }'):
        last = repeats.note(call(text), "x")
    assert last is Repeat.HINT


@given(st.lists(st.text(max_size=3), unique=True, min_size=WINDOW))
def test_polling_is_no_circle(results: list[str]) -> None:
    repeats = Repeats()
    assert {repeats.note(call(), result) for result in results} == {Repeat.NEW}


def test_other_arguments_names_and_broken_text_are_other_calls() -> None:
    repeats = Repeats()
    calls = (call("{"), call("{ "), call("{}"), call("{}", "read"), call('{"a": 1}'), call("\udc80"))
    assert {repeats.note(one, "\udc80") for one in calls} == {Repeat.NEW}
