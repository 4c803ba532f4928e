"""What beam search and ``best_of`` can be asked for, and with what they don't go together."""

from __future__ import annotations

from kvd.commands import Submit
from kvd.types import SamplingParams

_MOST_PENALTY = 10.0
_NOT_PENALISED = (1.0, 0.0, 0.0)


def num_sequences(command: Submit) -> int:
    """Sequences that a request runs at once, at most."""
    return command.beam.width if command.beam is not None else max(command.num_choices, command.best_of)


def problem_of(command: Submit, most_choices: int) -> str:
    """Why the way in which the request's choices are found is refused, or nothing."""
    if command.beam is not None:
        return _problem_of_beams(command, most_choices)
    if not command.best_of:
        return ""
    if not command.num_choices <= command.best_of <= most_choices:
        return f"best_of is {command.best_of}: it must be from n ({command.num_choices}) to {most_choices}"
    if command.best_of > command.num_choices and command.sampling.temperature == 0:
        return f"best_of is {command.best_of} and temperature 0: all choices would be the same; raise the temperature, or leave best_of out"
    return ""


def _problem_of_beams(command: Submit, most_choices: int) -> str:
    beam, sampling = command.beam, command.sampling
    assert beam is not None, "the caller has looked"
    if not 1 <= beam.width <= most_choices:
        return f"the beam's width is {beam.width}: 1 to {most_choices} are possible"
    if command.num_choices > beam.width:
        return f"{command.num_choices} choices are asked for of {beam.width} beams: widen the beam, or ask for fewer"
    if not abs(beam.length_penalty) <= _MOST_PENALTY:  # nan is in no range
        return f"the beam's length_penalty is {beam.length_penalty}: it must be from -{_MOST_PENALTY:g} to {_MOST_PENALTY:g}"
    if command.best_of:
        return "beam search and best_of don't go together: the n best beams are returned as it is"
    if sampling.temperature not in (0.0, 1.0) or sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        return "beam search draws nothing: leave temperature, top_k, top_p and min_p out"
    if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != _NOT_PENALISED:
        return "beam search goes by the model's own log-probabilities: leave the penalties out"
    if changed := _changes(sampling):
        return f"beam search goes by the model's own log-probabilities: leave {changed} out"
    if command.constraint is not None:
        return "beam search and a constraint don't go together: sample with best_of instead"
    if command.speculation is not None and command.speculation.mode != "off":
        return "beam search does not speculate: a draft would have to be verified for every beam; leave speculation out"
    return ""


def _changes(sampling: SamplingParams) -> str:
    names = ("logit_bias", "allowed_token_ids", "banned_token_ids", "bad_words")
    return ", ".join(name for name in names if getattr(sampling, name))
