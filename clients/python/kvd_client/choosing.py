"""How a request's answers are found, from a caller's options: sampled, the best of several, or by beam search."""

from __future__ import annotations

from typing import Any

from kvd_client.errors import BadRequest
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Beam


def take_beam(fields: dict[str, Any]) -> Beam | None:
    """Take the options of beam search out of ``fields``; None if it is not asked for.

    Raises:
        BadRequest: options of it stand without ``beam_width``, or ``early_stopping`` is no word of it.
    """
    names = [name for name in ("length_penalty", "early_stopping") if name in fields]
    if fields.get("beam_width") is None:
        if names:
            verb = "is" if len(names) == 1 else "are"
            raise BadRequest(f"{' and '.join(names)} {verb} for beam search: give beam_width", code=Code.BAD_REQUEST)
        fields.pop("beam_width", None)
        return None
    early_stopping = fields.pop("early_stopping", False)
    if not isinstance(early_stopping, bool) and early_stopping not in (None, "never"):
        raise BadRequest(f"early_stopping is {early_stopping!r:.40}; it must be True, False or 'never'", code=Code.BAD_REQUEST)
    return Beam(
        width=fields.pop("beam_width"),
        length_penalty=fields.pop("length_penalty", 1.0),
        early_stopping=early_stopping if isinstance(early_stopping, bool) else None,
    )
