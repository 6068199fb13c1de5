"""L5: what the harness holds does not come out, in the forms that are promised."""

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asp_agent.redact import MARK, MIN_CHARACTERS, Redactor


@pytest.mark.parametrize(
    "value", ["dtn_0123456789", "AKIAIOSFODNN7EXAMPLE", "AIzaSyA-0123456789", "x-api-key: abcdefgh", "p w\u00e9\n12345"]
)
def test_p63_held_values_in_every_promised_form(value: str) -> None:
    redact = Redactor([value])
    forms = [value, quote(value, safe=""), json.dumps(value)[1:-1], base64.b64encode(value.encode()).decode()]
    for form in forms:
        assert form.rstrip("=") not in redact(f"a {form} b {form}c"), form
    assert redact("AKIAXXXXXXXXXXXXXXXX") == "AKIAXXXXXXXXXXXXXXXX", "look-alikes that we do not hold stay"


def test_short_values_are_left_alone() -> None:
    assert Redactor(["root", "x" * (MIN_CHARACTERS - 1), ""])("root xxxxxxx") == "root xxxxxxx"


def test_the_longer_value_wins() -> None:
    assert Redactor(["abcdefgh", "abcdefghij"])("abcdefghij abcdefgh") == f"{MARK} {MARK}"


def test_any_line_of_a_key_is_taken_out() -> None:
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "QUJD" * 16 + "\n" + "REVG" * 16 + "\n-----END OPENSSH PRIVATE KEY-----\n"
    redact = Redactor([key])
    assert redact(key) == MARK + "\n" * 4
    assert "QUJD" not in redact(key.replace("\n", "\r\n"))
    assert "REVG" not in redact("> " + "REVG" * 16 + " <")


def test_tree() -> None:
    value = {"a": ["secretsecret", {"secretsecret": 1}], "n": 5, "none": None}
    assert Redactor(["secretsecret"]).tree(value) == {"a": [MARK, {MARK: 1}], "n": 5, "none": None}


@given(
    st.lists(st.text(alphabet="abc\n", min_size=MIN_CHARACTERS, max_size=12), min_size=1, max_size=4),
    st.text(alphabet="xyz \n"),
)
def test_no_value_survives_and_lines_keep_their_numbers(values: list[str], around: str) -> None:
    redact = Redactor(values)
    for value in (value.strip() for value in values):
        text = f"{around}{value}{around}"
        assert len(value) < MIN_CHARACTERS or value not in redact(text)
        assert redact(text).count("\n") == text.count("\n")
