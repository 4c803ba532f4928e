"""Beam search as a rule: from each open beam's most likely tokens to the beams of the next step, and in the end the best hypotheses.

The rule is that of transformers' ``generate(num_beams=…, do_sample=False)`` (5.x), for one prompt: the best ``max(2, 1 + number of stop ids)`` times
``width`` continuations are looked at; of these, those that end (by a stop id, or all of them at the last token) become finished hypotheses if they are among the
best ``width``, and the best ``width`` of the others stay open. A finished hypothesis scores its log-probability over (generated tokens, the stop id
included) ** ``length_penalty``; the best ``width`` finished ones are kept. Knows no request, row or block.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvd.types import BeamSearch, FinishReason, TokenLogprobs


class Hypothesis:
    """A generated text as its last token and what came before; texts with a common beginning share it."""

    __slots__ = ("entry", "length", "logprob", "parent", "token_id")

    def __init__(self, parent: Hypothesis | None, token_id: int, logprob: float, entry: TokenLogprobs | None) -> None:
        self.parent = parent
        self.token_id = token_id
        self.logprob = logprob
        """Sum over all of its tokens, nats."""
        self.entry = entry
        self.length: int = 1 if parent is None else parent.length + 1

    def path(self) -> list[Hypothesis]:
        """From the first token on."""
        steps: list[Hypothesis] = []
        step: Hypothesis | None = self
        while step is not None:
            steps.append(step)
            step = step.parent
        steps.reverse()
        return steps


class Finished:
    """A hypothesis that ended, and its score."""

    __slots__ = ("hypothesis", "reason", "score")

    def __init__(self, hypothesis: Hypothesis, reason: FinishReason, score: float) -> None:
        self.hypothesis = hypothesis
        self.reason = reason
        self.score = score


class BeamRule:
    """The search of one request.

    Attributes:
        open: the hypotheses that go on, the best first: none before the first step, then ``width``.
        finished: those that ended, the best first; at most ``width``.
        is_over: nothing goes on.
    """

    __slots__ = ("_beam", "_max_tokens", "_min_tokens", "_num_kept", "_num_shown", "_stop_ids", "finished", "is_over", "length", "open")

    def __init__(
        self, beam: BeamSearch, *, stop_token_ids: frozenset[int], max_tokens: int, min_tokens: int, num_logprobs: int | None
    ) -> None:
        """``num_logprobs`` is as in ``SamplingParams``: what the tokens of finished hypotheses are described with."""
        self._beam = beam
        self._stop_ids = stop_token_ids
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._num_kept = num_looked_at(beam, len(stop_token_ids))
        self._num_shown = num_logprobs
        self.length = 0
        self.open: list[Hypothesis] = []
        self.finished: list[Finished] = []
        self.is_over = False

    @property
    def num_candidates(self) -> int:
        """Most likely tokens of each open beam that a step needs: stop ids that may not come yet are passed over, and as many are shown as were asked for."""
        return max(self._num_kept + (len(self._stop_ids) if self._min_tokens else 0), self._num_shown or 0)

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """A step: ``candidates`` are the (token id, log-probability) of each open beam's most likely tokens, at first of the prompt's alone.

        Returns:
            For each beam that is open now the place, among those before, of the one that it continues.
        """
        parents: list[Hypothesis | None] = [*self.open] or [None]
        may_stop = self.length >= self._min_tokens
        self.length += 1
        is_last = self.length >= self._max_tokens
        pool = [
            (logprob + (0.0 if parent is None else parent.logprob), -place, -rank, token_id)
            for place, (parent, row) in enumerate(zip(parents, candidates, strict=True))
            for rank, (token_id, logprob) in enumerate(row)
            if may_stop or token_id not in self._stop_ids
        ]
        self.open = []
        places: list[int] = []
        for rank, (total, negative_place, negative_rank, token_id) in enumerate(heapq.nlargest(self._num_kept, pool)):
            place = -negative_place
            stops = token_id in self._stop_ids
            if not stops and not is_last:
                if len(self.open) < self._beam.width:
                    self.open.append(self._extended(parents[place], token_id, total, candidates[place], -negative_rank))
                    places.append(place)
            elif rank < self._beam.width:
                hypothesis = self._extended(parents[place], token_id, total, candidates[place], -negative_rank)
                self._finish(hypothesis, FinishReason.STOP if stops else FinishReason.LENGTH)
        del self.finished[self._beam.width :]
        self.is_over = is_last or not self.open or not self._may_improve()
        if self.is_over:
            self.open, places = [], []
        return places

    def _extended(self, parent: Hypothesis | None, token_id: int, total: float, row: Sequence[tuple[int, float]], rank: int) -> Hypothesis:
        shown = self._num_shown
        entry = None if shown is None else TokenLogprobs(token_id, row[rank][1], tuple(row[:shown]))
        return Hypothesis(parent, token_id, total, entry)

    def _finish(self, hypothesis: Hypothesis, reason: FinishReason) -> None:
        score = hypothesis.logprob / self.length**self._beam.length_penalty
        place = next((place for place, other in enumerate(self.finished) if other.score < score), len(self.finished))
        self.finished.insert(place, Finished(hypothesis, reason, score))

    def _may_improve(self) -> bool:
        """Whether the open beams may still change what is finished; for ``early_stopping`` False that is a guess, by the present length."""
        beam = self._beam
        if len(self.finished) < beam.width:
            return True
        if beam.early_stopping is True:
            return False
        length = self._max_tokens if beam.early_stopping is None and beam.length_penalty > 0 else self.length
        best: float = self.open[0].logprob / length**beam.length_penalty
        return best > self.finished[-1].score


def num_looked_at(beam: BeamSearch, num_stop_ids: int) -> int:
    """Continuations that a step looks at: enough that ``width`` of them don't end."""
    return max(2, 1 + num_stop_ids) * beam.width
