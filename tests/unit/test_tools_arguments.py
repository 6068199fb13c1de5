"""Arguments are checked strictly: nothing is repaired, every refusal says why (P69, P70)."""

import json

import pytest
from agent_parts import TOOLS
from hypothesis import given
from hypothesis import strategies as st

from asp_agent.tools.arguments import ArgumentsInvalid, parse

BASH, READ, EDIT = (TOOLS[name].schema.parameters for name in ("bash", "read", "edit"))


@pytest.mark.parametrize(
    ("raw", "schema", "words"),
    [
        ('{"command": ls}', BASH, "not valid JSON"),
        ('{"command": "ls', BASH, "may have been cut off"),
        ("", BASH, "may have been cut off"),
        ("[]", BASH, "not an array"),
        ("null", BASH, "not null"),
        ('"ls"', BASH, "not a string"),
        ("{}", BASH, "command is missing"),
        ('{"command": null}', BASH, "command: must be a string, not null"),
        ('{"command": "ls", "timeout": "10"}', BASH, "timeout: must be a number, not a string"),
        ('{"command": "ls", "timeout": true}', BASH, "timeout: must be a number, not a boolean"),
        ('{"command": "ls", "timeout": 0}', BASH, "timeout: must be greater than 0"),
        ('{"command": "ls", "timeout": 601}', BASH, "timeout: must be at most 600"),
        ('{"command": "ls", "timeout": NaN}', BASH, "NaN is not a JSON number"),
        ('{"command": "ls", "timeout": -Infinity}', BASH, "-Infinity is not"),
        ('{"command": "ls", "timeout": 1e999}', BASH, "must be at most 600"),
        ('{"command": "ls", "timeout": ' + "1" * 5000 + "}", BASH, "too long"),
        ('{"command": "ls", "command": "rm"}', BASH, '"command" twice'),
        ('{"command": ""}', BASH, "must not be empty"),
        ('{"command": "\\ud800"}', BASH, "surrogate"),
        ('{"path": ["a"]}', READ, "path: must be a string, not an array"),
        ('{"path": "a", "offset": 0}', READ, "offset: must be at least 1"),
        ('{"path": "a", "offset": 1.5}', READ, "offset: must be an integer"),
        ('{"path": "a", "lines": 3}', READ, 'unknown "lines" (known: path, offset, limit)'),
        ('{"path": "a", "edits": []}', EDIT, "edits: must not be empty"),
        ('{"path": "a", "edits": [{"oldText": "x"}]}', EDIT, "edits[0]: newText is missing"),
        ("[" * 100_000, BASH, "too deep"),
    ],
)
def test_refused(raw: str, schema: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentsInvalid) as refused:
        parse(raw, schema)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 600


def test_a_fault_does_not_repeat_a_whole_file() -> None:
    with pytest.raises(ArgumentsInvalid) as refused:
        parse(json.dumps({"path": "a", "content": ["x" * 100_000]}), TOOLS["write"].schema.parameters)
    assert len(str(refused.value)) < 200


def test_accepted() -> None:
    assert parse(' {"command": "ls", "timeout": 1.5} ', BASH) == {"command": "ls", "timeout": 1.5}
    assert parse('{"path": "\\ud83d\\ude00"}', READ) == {"path": "\U0001f600"}


@given(st.text(max_size=40) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_refused_or_fits(raw: str) -> None:
    try:
        value = parse(raw, BASH)
    except ArgumentsInvalid:
        return
    assert isinstance(value["command"], str)
