"""Whether a JSON value is what a schema describes: the plain reading of the keywords that the tests use, and an error for any other."""

from __future__ import annotations

import re
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def matches(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    root = root or schema
    return all(_keyword(value, keyword, wanted, schema, root) for keyword, wanted in schema.items())


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _keyword(value: Any, keyword: str, wanted: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    match keyword:
        case "type":
            return _is(value, wanted)
        case "enum":
            return value in wanted
        case "const":
            return bool(value == wanted)
        case "$ref":
            return matches(value, root["$defs"][wanted.rpartition("/")[2]], root)
        case "anyOf":
            return any(matches(value, each, root) for each in wanted)
        case "required":
            return all(name in value for name in wanted)
        case "properties":
            return all(matches(value[name], each, root) for name, each in wanted.items() if name in value)
        case "additionalProperties":
            assert wanted is False
            return value.keys() <= schema["properties"].keys()
        case "items":
            return all(matches(each, wanted, root) for each in value)
        case "minItems":
            return len(value) >= wanted
        case "maxItems":
            return len(value) <= wanted
        case "minLength":
            return len(value) >= wanted
        case "maxLength":
            return len(value) <= wanted
        case "minimum":
            return bool(value >= wanted)
        case "maximum":
            return bool(value <= wanted)
        case "pattern":
            return re.search(wanted, value) is not None
        case "$defs":
            return True
    raise AssertionError(f"{keyword} is not read")
