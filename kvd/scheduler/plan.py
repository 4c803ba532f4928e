"""A step in the making: columns that grow row by row."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate, chain

from kvd.cache.manager import BlockTable, CopyOnWrite, Node
from kvd.scheduler.request import Sequence
from kvd.step import BlockCopy, ContinuedRows, LateMasks, SchedulerOutput, SharedRuns, StartedRow, TokenMasks
from kvd.types import BlockId


class StepPlan:
    """Collects one step's rows and what is left of its token budget."""

    __slots__ = (
        "awaits_ids", "block_ids", "block_offsets", "budget", "constrained", "copies", "copying", "fills", "given", "late_masks", "masks", "masks_are_late", "num_draft", "num_tokens", "rows", "started", "step",
    )  # fmt: skip

    def __init__(self, step: int, budget_tokens: int) -> None:
        self.step = step
        self.budget = budget_tokens
        self.started: list[StartedRow] = []
        self.rows: list[int] = []
        self.num_tokens: list[int] = []
        self.block_offsets: list[int] = [0]
        self.block_ids: list[BlockId] = []
        self.copies: list[BlockCopy] = []
        self.copying: list[BlockTable] = []
        """Tables that hold the source of a copy until the step is submitted."""
        self.fills: list[Node] = []
        self.num_draft: dict[int, int] = {}
        """By place in ``rows``: how many of its positions are drafted."""
        self.given: dict[int, Collection[int]] = {}
        """By place in ``rows``: the tokens of its positions."""
        self.masks: TokenMasks | None = None
        self.late_masks: LateMasks | None = None
        self.constrained: list[tuple[Sequence, Collection[int]]] = []
        """Sequences whose samples need masks, each with the tokens drafted for it."""
        self.masks_are_late = False
        """Whether one of them has samples in flight."""
        self.awaits_ids = False
        """Whether a stepwise sequence samples in it, and can't be in a step that is planned before this one's samples are known."""

    @property
    def is_empty(self) -> bool:
        return not self.rows and not self.started

    def start(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence's first step on its new row."""
        table, command = sequence.table, sequence.request.command
        assert table is not None, "a row starts with blocks"
        self.started.append(
            StartedRow(
                row=sequence.row,
                token_ids=bytes(sequence.tokens),
                num_prompt_tokens=sequence.request.num_prompt_tokens,
                num_computed=sequence.num_computed,
                num_tokens=num_tokens,
                block_ids=tuple(table.block_ids),
                sampling=sequence.request.sampling,
                choice=sequence.choice,
                num_choices=sequence.num_samples,
                banned_token_ids=command.stop_token_ids if command.min_tokens else (),
                min_tokens=command.min_tokens,
                adapter=command.adapter,
                prompt_logprobs=command.prompt_logprobs if sequence.request.wants_scores else None,
                is_rejection=sequence.request.speculation.acceptance == "rejection",
                drafts=sequence.request.asks_draft_model,
            )
        )
        sequence.num_blocks_sent = len(table.block_ids)
        if table.partial is not None:
            self.copy(sequence, (table.partial,))
            self.copying.append(table)

    def proceed(self, sequence: Sequence, num_tokens: int, *, num_draft: int = 0, given: Collection[int] = ()) -> None:
        """A further step of a row, with the blocks appended since the last; the last ``num_draft`` of its positions are drafted, ``given`` are the tokens
        of all of them if it is not empty.
        """
        table = sequence.table
        assert table is not None, "a row goes on with blocks"
        if num_draft:
            self.num_draft[len(self.rows)] = num_draft
        if given:
            self.given[len(self.rows)] = given
        self.rows.append(sequence.row)
        self.num_tokens.append(num_tokens)
        if len(table.block_ids) > sequence.num_blocks_sent:
            self.block_ids += table.block_ids[sequence.num_blocks_sent :]
            sequence.num_blocks_sent = len(table.block_ids)
        self.block_offsets.append(len(self.block_ids))

    def mask(self, sequence: Sequence, draft: Collection[int] = ()) -> None:
        """The row samples under its constraint; with a draft, whose tokens the constraint allows, after each of its tokens too. Called before its samples are counted."""
        self.constrained.append((sequence, draft))
        self.masks_are_late = self.masks_are_late or sequence.num_known < sequence.num_total

    def copy(self, sequence: Sequence, copies: tuple[CopyOnWrite, ...]) -> None:
        self.copies.extend(BlockCopy(copy.source, copy.target, copy.index, sequence.row) for copy in copies)

    def output(self, released_rows: list[int], shared_runs: SharedRuns) -> SchedulerOutput:
        continued = ContinuedRows(self.rows, self.num_tokens, self.block_offsets, self.block_ids)
        if self.num_draft:
            continued.num_draft.extend(self.num_draft.get(place, 0) for place in range(len(self.rows)))
        if self.given:
            counts = (len(self.given.get(place, ())) for place in range(len(self.rows)))
            continued.given_offsets.extend(accumulate(counts, initial=0))
            continued.given_ids.extend(chain.from_iterable(self.given.values()))
        return SchedulerOutput(
            step=self.step,
            started=tuple(self.started),
            continued=continued,
            released=tuple(released_rows),
            copies=tuple(self.copies),
            fills=tuple(self.fills),
            shared_runs=shared_runs,
            masks=self.masks,
            late_masks=self.late_masks,
        )
