"""Speculative decoding, from a caller's options."""

from __future__ import annotations

from typing import Any

from kvd_client.errors import BadRequest
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Speculation


def take_speculation(fields: dict[str, Any]) -> Speculation | None:
    """Take the options of speculation out of ``fields``; None if all of it is left to the daemon.

    Without a mode the others hold where the daemon drafts by itself: they say how, not whether.

    Raises:
        BadRequest: options of it stand beside the mode ``off``.
    """
    given = {name: fields.pop(name) for name in ("speculation", "num_draft", "draft_acceptance") if name in fields}
    mode = given.pop("speculation", None)
    if mode is None and not given:
        return None
    if mode == "off" and given:
        verb = "is" if len(given) == 1 else "are"
        raise BadRequest(f"{' and '.join(given)} {verb} for drafts, and speculation is off", code=Code.BAD_REQUEST)
    return Speculation(
        mode="" if mode is None else mode, num_draft=given.get("num_draft", 0), acceptance=given.get("draft_acceptance", "coupled")
    )
