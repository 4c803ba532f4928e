"""``constraint`` at the edge: its kind, and its source in a body frame of its own. Whether it makes sense is for the engine's side to say."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from kvd_client.protocol.messages import CONSTRAINT_KINDS, Generate

from kvd.transport.errors import bad_request
from kvd.types import Constraint

_MAX_CHOICE_BYTES = 1 << 20
_WITHOUT_SOURCE = ("", "json")


def check_constraint(message: Generate) -> None:
    """What can be told of a constraint without its source.

    Raises:
        RequestError: ``bad_request``, naming the field.
    """
    if not message.constraint:
        return
    if message.constraint not in CONSTRAINT_KINDS:
        raise bad_request(f"constraint is {message.constraint!r:.40}; it must be one of {', '.join(CONSTRAINT_KINDS)}")
    if message.beam is not None:
        raise bad_request(
            "constraint and beam don't go together: a beam's tokens are chosen among all; leave one of them out, or sample best_of"
        )


def has_source(message: Generate) -> bool:
    """Whether the constraint's source is a body frame behind the input's."""
    return message.constraint not in _WITHOUT_SOURCE


def read_constraint(message: Generate, bodies: Sequence[bytes]) -> Constraint | None:
    """The constraint of a ``generate`` with all of its body frames.

    Raises:
        RequestError: ``bad_request``: the source is no UTF-8, or no msgpack array of strings where it should be one.
    """
    if not has_source(message):
        return Constraint(message.constraint) if message.constraint else None
    body = bodies[1]
    if message.constraint != "choice":
        try:
            return Constraint(message.constraint, (body.decode("utf-8"),))
        except UnicodeDecodeError as error:
            raise bad_request(f"the constraint is not UTF-8: {error.reason} at byte {error.start}") from None
    if len(body) > _MAX_CHOICE_BYTES:
        raise bad_request(f"the alternatives of a constraint have {len(body)} bytes; at most {_MAX_CHOICE_BYTES} are read")
    try:
        return Constraint("choice", tuple(msgspec.msgpack.decode(body, type=list[str])))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the alternatives of a constraint are no msgpack array of strings: {error!s:.200}") from None
