"""``speculation`` at the edge: words and numbers that can be sent, and the combination that the engine can't see. It knows the others."""

from __future__ import annotations

import msgspec
from kvd_client.protocol.messages import Generate
from kvd_client.protocol.messages import Speculation as Wanted

from kvd.commands import RequestUsage
from kvd.transport.errors import bad_request
from kvd.types import Speculation

_MODES = ("auto", "off", "ngram", "draft")
_ACCEPTANCES = ("coupled", "rejection")
_MOST_DRAFT = 32


def check_speculation(message: Generate) -> None:
    """What can be told of ``speculation`` before the engine judges it.

    Raises:
        RequestError: ``bad_request``, naming the field.
    """
    wanted = message.speculation
    if wanted is None:
        return
    if wanted.mode and wanted.mode not in _MODES:
        raise bad_request(f"speculation has the mode {wanted.mode!r:.40}; it must be one of {', '.join(_MODES)}")
    if wanted.acceptance not in _ACCEPTANCES:
        raise bad_request(f"speculation has the acceptance {wanted.acceptance!r:.40}; it must be one of {', '.join(_ACCEPTANCES)}")
    if not 0 <= wanted.num_draft <= _MOST_DRAFT:
        raise bad_request(f"speculation has num_draft {wanted.num_draft}; it must be from 0 to {_MOST_DRAFT}")
    if wanted.mode == "off":
        return
    if wanted.acceptance == "rejection" and message.sampling.seed is not None:
        raise bad_request(
            "speculation with acceptance rejection and seed don't go together: what is put out then depends on what was drafted, and no seed repeats it;"
            " leave the seed out, or use acceptance coupled"
        )


def speculation(wanted: Wanted | None) -> Speculation | None:
    """As the engine has it."""
    return None if wanted is None else Speculation(wanted.mode, wanted.num_draft, wanted.acceptance)


def drafted(usage: RequestUsage) -> dict[str, int | msgspec.UnsetType]:
    """The fields of ``usage`` that tell of drafts, where there were any."""
    if not usage.drafted_tokens:
        return {}
    return {"drafted_tokens": usage.drafted_tokens, "accepted_tokens": usage.accepted_tokens}
