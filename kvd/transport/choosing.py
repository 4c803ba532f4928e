"""``beam`` and ``best_of`` at the edge: numbers that can be sent, and the one combination that the engine can't see."""

from __future__ import annotations

from kvd_client.protocol.messages import Beam, Generate

from kvd.commands import ChoiceDone
from kvd.transport.errors import bad_request
from kvd.transport.stream import ChoiceStream
from kvd.types import BeamSearch


def check_choosing(message: Generate, *, max_choices: int, vocab_size: int) -> None:
    """What can be told of ``beam`` and ``best_of`` before the engine judges them.

    Raises:
        RequestError: ``bad_request``, naming the field.
    """
    beam, most = message.beam, min(max_choices, vocab_size // 2)
    if beam is not None and not 1 <= beam.width <= most:
        raise bad_request(f"beam has the width {beam.width}; it must be from 1 to {most}")
    if message.best_of < 0:
        raise bad_request(f"best_of is {message.best_of}; it must be at least 0")
    if message.stop and (beam is not None or message.best_of > message.n):
        what = "best_of above n" if beam is None else "beam search"
        raise bad_request(f"stop and {what} don't go together: texts are not known before the best is chosen; give stop_token_ids instead")


def choice_scores(done: ChoiceDone | None, stream: ChoiceStream) -> dict[str, float]:
    """The log-probability of a choice's told tokens where it is known, and a beam's score; ``done`` is the engine's word on it, None where it was cut off."""
    scores: dict[str, float] = {}
    if done is not None and done.cumulative_logprob is not None:
        scores["cumulative_logprob"] = done.cumulative_logprob
    elif stream.cumulative_logprob is not None:
        scores["cumulative_logprob"] = stream.cumulative_logprob
    if done is not None and done.score is not None:
        scores["score"] = done.score
    return scores


def beam_search(beam: Beam | None) -> BeamSearch | None:
    """The engine's form."""
    return None if beam is None else BeamSearch(beam.width, beam.length_penalty, beam.early_stopping)
