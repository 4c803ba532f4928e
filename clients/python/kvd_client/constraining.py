"""What an answer must match, from a caller's options: at most one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvd_client.errors import BadRequest
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import CONSTRAINT_KINDS


def take_constraint(fields: dict[str, Any]) -> tuple[str, tuple[bytes, ...]]:
    """Take the constraint out of ``fields``: its kind (empty: none), and its source as the body frame that goes behind the prompt's.

    Raises:
        BadRequest: several constraints are named, or one can't be sent.
    """
    given = {kind: value for kind in CONSTRAINT_KINDS if (value := fields.pop(kind, None)) is not None}
    if given.get("json") is False:
        del given["json"]
    if not given:
        return "", ()
    if len(given) > 1:
        raise BadRequest(f"{' and '.join(given)} are given; an answer has one constraint at most", code=Code.BAD_REQUEST)
    kind, value = given.popitem()
    try:
        return kind, _source(kind, value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"{kind} can't be sent: {error}", code=Code.BAD_REQUEST) from error


def _source(kind: str, value: Any) -> tuple[bytes, ...]:
    if kind == "json":
        if value is not True:
            raise TypeError("it is True or False")
        return ()
    if kind == "choice":
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(each, str) for each in value):
            raise TypeError("it is a sequence of strings")
        return (codec.pack_body(list(value)),)
    if kind == "json_schema" and (isinstance(value, Mapping) or value is True):
        return (json.dumps(value, ensure_ascii=False, allow_nan=False).encode(),)
    if not isinstance(value, str):
        raise TypeError(f"it is {'a mapping or ' if kind == 'json_schema' else ''}a string")
    return (value.encode(),)
