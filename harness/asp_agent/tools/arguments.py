"""Arguments as the model wrote them become a checked object, or one text that says what is wrong with them.

Nothing is repaired and nothing is guessed (L2): a call whose arguments were cut must not run with what is left of them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

_SHOWN_FAULTS = 5
_SHOWN_CHARACTERS = 120
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class ArgumentsInvalid(Exception):
    """The arguments cannot be used; the text tells the model why."""


def parse(raw: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call: strict JSON, an object, no key twice, valid against ``schema``.

    Raises ArgumentsInvalid with a text for the model. Types are not converted: ``"10"`` is not a number (P70).
    """
    try:
        value: Any = json.loads(raw, parse_constant=_refuse_constant, object_pairs_hook=_object)
        surrogate = _LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False))
    except json.JSONDecodeError as error:
        short = error.pos >= len(raw.rstrip()) or error.msg.startswith("Unterminated")
        hint = " The text ends too early; it may have been cut off." if short else ""
        msg = f"The arguments are not valid JSON ({error.msg} at character {error.pos}).{hint}"
        raise ArgumentsInvalid(msg) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested lists
        msg = "The arguments are not usable JSON: a number is too long or the nesting is too deep."
        raise ArgumentsInvalid(msg) from error
    if not isinstance(value, dict):
        msg = f"The arguments must be a JSON object, not {_kind(value)}."
        raise ArgumentsInvalid(msg)
    if surrogate:
        msg = "The arguments hold half of a UTF-16 surrogate pair, which is no character."
        raise ArgumentsInvalid(msg)
    arguments = cast("dict[str, Any]", value)
    faults = list(dict.fromkeys(_faults(arguments, schema)))  # one fault for all that is missing
    if faults:
        more = [f"and {len(faults) - _SHOWN_FAULTS} more"] if len(faults) > _SHOWN_FAULTS else []
        msg = "The arguments do not fit this tool: " + "; ".join(faults[:_SHOWN_FAULTS] + more) + "."
        raise ArgumentsInvalid(msg)
    return arguments


def _refuse_constant(name: str) -> NoReturn:
    msg = f"The arguments are not valid JSON ({name} is not a JSON number)."
    raise ArgumentsInvalid(msg)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        msg = f"The arguments name {_short(twice)} twice."
        raise ArgumentsInvalid(msg)
    return value


def _faults(value: dict[str, Any], schema: Mapping[str, Any]) -> Iterable[str]:
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - 0.1 s that `--help` must not pay

    errors = Draft202012Validator(schema).iter_errors(value)  # pyright: ignore[reportUnknownMemberType]
    return (_fault(error) for error in sorted(errors, key=lambda error: error.json_path))


def _fault(error: "ValidationError") -> str:
    """One fault in our own words, never with the whole value in it: that can be a file."""
    place = error.json_path.removeprefix("$").removeprefix(".")
    where = f"{place}: " if place else ""
    wanted: Any = error.validator_value  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    instance: Any = error.instance  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    match error.validator:  # pyright: ignore[reportUnknownMemberType]
        case "type":
            return f"{where}must be {_article(str(wanted))}, not {_kind(instance)}"
        case "required":
            missing = [name for name in wanted if name not in instance]
            return f"{where}{', '.join(missing)} is missing"
        case "additionalProperties":
            known = cast("Mapping[str, Any]", error.schema)["properties"]
            extra = sorted(set(instance) - set(known))
            return f"{where}unknown {', '.join(map(_short, extra[:_SHOWN_FAULTS]))} (known: {', '.join(known)})"
        case "minLength" | "minItems":
            return f"{where}must not be empty"
        case "minimum":
            return f"{where}must be at least {wanted}"
        case "maximum":
            return f"{where}must be at most {wanted}"
        case "exclusiveMinimum":
            return f"{where}must be greater than {wanted}"
        case _:
            return where + _short(error.message)


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeio" else f"a {name}"


def _short(text: str) -> str:
    return json.dumps(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…", ensure_ascii=False)
