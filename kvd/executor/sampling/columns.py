"""Sampling parameters as columns: what each row asked for, kept from its start, and one step's selection of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvd.executor.sampling.masks import DrawMasks, StepMasks
from kvd.executor.sampling.rules import NO_RULES, DrawRules, TokenRules
from kvd.step import LateMasks, SchedulerOutput, StartedRow

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Colder than this is greedy: dividing by it would say nothing more."""

_NO_TOKENS = np.zeros((0, 0), dtype=np.int64)
_NO_DRAWS = np.zeros(0, dtype=np.int64)
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Draws:
    """N draws of one step, as columns ``[N]``. ``row`` is the executor's row that each belongs to."""

    row: np.ndarray
    choice: np.ndarray
    position: np.ndarray
    """Absolute position of the token to be drawn."""
    temperature: np.ndarray
    """0 for greedy."""
    top_k: np.ndarray
    """0 for all."""
    top_p: np.ndarray
    min_p: np.ndarray
    repetition_penalty: np.ndarray
    presence_penalty: np.ndarray
    frequency_penalty: np.ndarray
    seed: np.ndarray
    """uint64."""
    num_logprobs: np.ndarray
    """-1 for none."""
    penalised: np.ndarray
    """bool: some penalty is not neutral."""
    rules: DrawRules | None = None
    """Bias, and what may be drawn; None: nothing of it anywhere."""
    masks: DrawMasks | None = None
    """What constraints allow; None: no draw has one."""
    drafted: tuple[np.ndarray, np.ndarray] | None = None
    """(draw, token id) pairs, int64: what was drafted before the draw's position, and counts as said for the penalties; None: nothing anywhere."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one step's draws, one a row, wish beside a token."""

    rules: DrawRules
    masked: np.ndarray
    """int64: the draws that have masks."""
    octets: np.ndarray | None
    """Their masks, as in ``DrawMasks``; None: the step's late masks are theirs, in this order."""
    num_logprobs: np.ndarray
    """int64, of each draw, -1 for none; empty: nobody's."""


class SamplingColumns:
    """Every row's parameters, set when the row starts."""

    def __init__(self, max_rows: int) -> None:
        self._floats = {name: np.zeros(max_rows, dtype=np.float32) for name in _FLOATS}
        self._top_k = np.zeros(max_rows, dtype=np.int64)
        self._seed = np.zeros(max_rows, dtype=np.uint64)
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int64)
        self._penalised = np.zeros(max_rows, dtype=bool)
        self._plain = np.zeros(max_rows, dtype=bool)
        """Greedy, without log-probabilities, penalties and lasting rules."""
        self._choice = np.zeros(max_rows, dtype=np.int64)
        self._num_choices = np.ones(max_rows, dtype=np.int64)
        self._rules = TokenRules(max_rows)
        self._is_rejection = np.zeros(max_rows, dtype=bool)
        self._max_rows = max_rows
        self._masks: StepMasks | None = None
        self._late_masks: LateMasks | None = None
        """Of the step, until somebody needs them."""

    def start(self, started: StartedRow) -> None:
        """Note the parameters of a row that begins."""
        row, sampling = started.row, started.sampling
        for name, column in self._floats.items():
            column[row] = getattr(sampling, name)
        if sampling.temperature < GREEDY_BELOW_TEMPERATURE:
            self._floats["temperature"][row] = 0
        self._top_k[row] = sampling.top_k
        self._seed[row] = sampling.seed & (1 << 64) - 1
        self._num_logprobs[row] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self._penalised[row] = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)
        self._rules.start(started)
        asks_more = self._num_logprobs[row] >= 0 or self._penalised[row] or self._rules.always[row]
        self._plain[row] = self._floats["temperature"][row] == 0 and not asks_more
        self._choice[row] = started.choice
        self._num_choices[row] = started.num_choices
        self._is_rejection[row] = started.is_rejection

    def begin_step(self, step: SchedulerOutput) -> None:
        """The masks of the step whose rows are sampled next."""
        self._masks = None if step.masks is None else StepMasks(step.masks, self._max_rows)
        self._late_masks = step.late_masks

    def penalised(self, row: int) -> bool:
        """Whether the row needs its tokens counted."""
        return bool(self._penalised[row])

    def reject(self, rows: np.ndarray) -> np.ndarray:
        """Bool: which of ``rows`` accept what they drafted by rejection sampling."""
        return self._is_rejection[rows]

    def are_plain(self, rows: np.ndarray, positions: np.ndarray) -> bool:
        """Whether all ``rows`` are greedy at ``positions`` and ask for nothing else: no log-probabilities, no penalty, no rule, no second choice."""
        if self._has_masks or not self._plain[rows].all() or (self._num_choices[rows] > 1).any():
            return False
        return not self._rules.hold(rows, positions)

    def are_untruncated(self, rows: np.ndarray, positions: np.ndarray) -> bool:
        """As ``are_plain``, but for rows that draw from all of their distribution too."""
        has_wish = self._has_masks or (self._num_logprobs[rows] >= 0).any() or self._rules.hold(rows, positions)
        return not has_wish and self.are_separable(rows)

    @property
    def _has_masks(self) -> bool:
        return self._masks is not None or self._late_masks is not None

    def are_separable(self, rows: np.ndarray) -> bool:
        """Whether a draw of ``rows`` is a matter of one pass over its logits, whatever was sampled before: they are greedy or draw from all that their rules and masks leave, and
        have no penalty, no bad word of several ids and no second choice.
        """
        floats = self._floats
        is_truncated = (floats["temperature"][rows] > 0) & (
            (self._top_k[rows] > 0) | (floats["top_p"][rows] < 1) | (floats["min_p"][rows] > 0)
        )
        asks_more = is_truncated | self._penalised[rows] | self._rules.follows_output[rows] | (self._num_choices[rows] > 1)
        return not asks_more.any()

    def wishes(self, rows: np.ndarray, positions: np.ndarray) -> Wishes | None:
        """What ``rows``, which are separable, wish of their draws at ``positions`` beside a token; None: nothing."""
        num_logprobs = self._num_logprobs[rows]
        rules = self._rules.of(rows, positions, _NO_TOKENS)
        asks = (num_logprobs >= 0).any()
        masked, octets = _NO_DRAWS, None
        if self._late_masks is not None:
            place = np.full(self._max_rows, -1, dtype=np.int64)
            place[rows] = np.arange(len(rows))
            masked = place[self._late_masks.rows]
        elif self._masks is not None and (masks := self._masks.of(rows, positions)) is not None:
            masked, octets = masks.draws, masks.octets
        if rules is None and not len(masked) and not asks:
            return None
        return Wishes(rules or NO_RULES, masked, octets, num_logprobs if asks else num_logprobs[:0])

    def randomness(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Temperatures float32 (0 for greedy), seeds uint64 and choices int64 of the rows."""
        return self._floats["temperature"][rows], self._seed[rows], self._choice[rows]

    def choices(self, rows: np.ndarray) -> list[int]:
        """The rows' own choices."""
        choices: list[int] = self._choice[rows].tolist()
        return choices

    def draws(self, rows: np.ndarray, positions: np.ndarray, known: np.ndarray) -> tuple[Draws, np.ndarray]:
        """The draws of ``rows`` at ``positions``, one a choice, and for each draw the index of its row among ``rows``.

        Waits for late masks. Choices beyond a row's own are drawn once, at its first sample. ``known [max_rows, positions]`` holds the rows' tokens before their positions.
        """
        if self._late_masks is not None:
            self._masks, self._late_masks = StepMasks(self._late_masks.wait(), self._max_rows), None
        counts = self._num_choices[rows]
        index = np.repeat(np.arange(len(rows)), counts)
        self._num_choices[rows] = 1
        row = rows[index]
        position = positions[index]
        nth = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
        draws = Draws(
            row=row,
            choice=self._choice[row] + nth,
            position=position,
            top_k=self._top_k[row],
            seed=self._seed[row],
            num_logprobs=self._num_logprobs[row],
            penalised=self._penalised[row],
            rules=self._rules.of(row, position, known),
            masks=None if self._masks is None else self._masks.of(row, position),
            **{name: column[row] for name, column in self._floats.items()},
        )
        return draws, index
