"""What an answer must look like: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and ``guided_*``, llama.cpp's ``grammar`` and ``json_schema``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvd.gateway.errors import ApiError, unsupported


class ConstraintFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that constrain its answer."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None


_GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "lark"}
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
_ANY_OBJECT = {"type": "object"}


def constraint_options(fields: ConstraintFields) -> dict[str, Any]:
    """The option of ``kvd_client``'s ``generate`` and ``chat``; none if the answer is free.

    Raises:
        ApiError: several are named, or one is of no known form.
    """
    found = list(_constraints(fields))
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise ApiError(400, f"{names} constrain the answer; one of them at most", param=found[1][0])
    return {kind: value for _, kind, value in found}


def constraint_field(fields: ConstraintFields) -> str | None:
    """The field that constrains the answer, of a request that was read."""
    return next((name for name, _, _ in _constraints(fields)), None)


def _constraints(fields: ConstraintFields) -> Iterator[tuple[str, str, Any]]:
    """(field, kind, source)"""
    if fields.response_format is not None:
        yield from _response_format(fields.response_format)
    if fields.structured_outputs is not None:
        yield from _structured(fields.structured_outputs)
    for name, kind in _GUIDED.items():
        if (value := getattr(fields, name)) is not None:
            if value is False:
                raise ApiError(400, f"{name} is false; it must be a schema that some value matches", param=name)
            yield name, kind, value
    if fields.grammar is not None:
        if not fields.grammar:
            raise ApiError(400, "grammar is empty; leave it away for a free answer", param="grammar")
        yield "grammar", "lark", fields.grammar
    if fields.json_schema is not None:
        yield "json_schema", "json_schema", fields.json_schema


def _response_format(value: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    match value:
        case {"type": "text"}:
            return
        case {"type": "json_object", "schema": dict(schema)}:  # llama.cpp's form
            yield "response_format", "json_schema", schema
        case {"type": "json_object", "schema": schema} if schema is not None:
            raise ApiError(400, "response_format must have an object as its schema", param="response_format")
        case {"type": "json_object"}:
            yield "response_format", "json_schema", _ANY_OBJECT
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}} | {"type": "json_schema", "schema": dict(schema)}:
            yield "response_format", "json_schema", schema
        case {"type": "json_schema"}:
            raise ApiError(400, "response_format of type json_schema needs json_schema.schema, an object", param="response_format")
        case _:
            raise ApiError(400, "response_format must have the type text, json_object or json_schema", param="response_format")


def _structured(value: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for name, source in value.items():
        if source is None or (source is False and name not in _STRUCTURED):  # such as disable_any_whitespace, which asks for nothing then
            continue
        if source is False:
            raise ApiError(400, f"structured_outputs.{name} is false; leave it away for a free answer", param=f"structured_outputs.{name}")
        if name == "json_object":
            yield "structured_outputs.json_object", "json_schema", _ANY_OBJECT
        elif name in _STRUCTURED:
            yield f"structured_outputs.{name}", _STRUCTURED[name], source
        else:
            raise unsupported(f"structured_outputs.{name}", f"there are json_object, {', '.join(_STRUCTURED)}")
