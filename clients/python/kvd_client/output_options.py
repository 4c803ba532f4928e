"""What may be said and what is told of the prompt, from a caller's options: the forms that the wire has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

from kvd_client.errors import BadRequest
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.token_ids import checked_ids

_IDS = ("allowed_token_ids", "banned_token_ids")


def take_rules(sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    """Bring the token rules among a request's ``sampling`` and other ``fields`` into the wire's form, in place.

    Raises:
        BadRequest: one can't be sent.
    """
    try:
        bias = sampling.get("logit_bias")
        if bias is not None:
            pairs = list(bias.items() if isinstance(bias, Mapping) else bias)
            ids = _ints([int(token_id) if isinstance(token_id, str) else token_id for token_id, _ in pairs])
            sampling["logit_bias"] = tuple((token_id, float(value)) for token_id, (_, value) in zip(ids, pairs, strict=True))
        for name in _IDS:
            if name in sampling:
                ids = sampling[name]
                sampling[name] = () if ids is None else _ints(ids)
                if name == "allowed_token_ids" and ids is not None and not sampling[name]:
                    raise BadRequest(
                        "allowed_token_ids is empty: no token could be sampled; leave it out where any may be", code=Code.BAD_REQUEST
                    )
        if "bad_words" in fields:
            words = fields["bad_words"] or ()
            fields["bad_words"] = (words,) if isinstance(words, str) else tuple(words)
    except (TypeError, ValueError) as error:
        raise BadRequest(
            f"logit_bias, allowed_token_ids, banned_token_ids or bad_words can't be sent: {error}", code=Code.BAD_REQUEST
        ) from error


def take_stop_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    """Take ``stop_token_ids`` out of ``fields``.

    Raises:
        BadRequest: they can't be sent.
    """
    try:
        return _ints(fields.pop("stop_token_ids", ()))
    except TypeError as error:
        raise BadRequest(f"stop_token_ids can't be sent: {error}", code=Code.BAD_REQUEST) from error


def _ints(ids: Iterable[int]) -> tuple[int, ...]:
    """Ids of whatever type as the wire takes them."""
    return tuple(map(index, checked_ids(ids)))


def take_tools(fields: dict[str, Any]) -> tuple[bool, tuple[bytes, ...]]:
    """Take the tools out of ``fields``: whether there are some, and their body frame.

    Raises:
        BadRequest: they can't be sent.
    """
    tools = fields.pop("tools", None) or ()
    if not tools:
        return False, ()
    try:
        return True, (codec.pack_body([dict(tool) for tool in tools]),)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(f"tools can't be sent: {error}", code=Code.BAD_REQUEST) from error
