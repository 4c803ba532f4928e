"""A step in the making: columns that grow row by row."""

from __future__ import annotations

from kvd.cache.manager import CopyOnWrite, Node
from kvd.scheduler.request import Sequence
from kvd.step import BlockCopy, ContinuedRows, SchedulerOutput, SharedRuns, StartedRow
from kvd.types import BlockId


class StepPlan:
    """Collects one step's rows and what is left of its token budget."""

    __slots__ = ("block_ids", "block_offsets", "budget", "copies", "fills", "num_tokens", "rows", "started", "step")

    def __init__(self, step: int, budget_tokens: int) -> None:
        self.step = step
        self.budget = budget_tokens
        self.started: list[StartedRow] = []
        self.rows: list[int] = []
        self.num_tokens: list[int] = []
        self.block_offsets: list[int] = [0]
        self.block_ids: list[BlockId] = []
        self.copies: list[BlockCopy] = []
        self.fills: list[Node] = []

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
                sampling=command.sampling,
                choice=sequence.choice,
                num_choices=sequence.num_samples,
                banned_token_ids=command.stop_token_ids if command.min_tokens else (),
                min_tokens=command.min_tokens,
            )
        )
        sequence.num_blocks_sent = len(table.block_ids)

    def proceed(self, sequence: Sequence, num_tokens: int) -> None:
        """A further step of a row, with the blocks appended since the last."""
        table = sequence.table
        assert table is not None, "a row goes on with blocks"
        self.rows.append(sequence.row)
        self.num_tokens.append(num_tokens)
        if len(table.block_ids) > sequence.num_blocks_sent:
            self.block_ids += table.block_ids[sequence.num_blocks_sent :]
            sequence.num_blocks_sent = len(table.block_ids)
        self.block_offsets.append(len(self.block_ids))

    def copy(self, sequence: Sequence, copies: tuple[CopyOnWrite, ...]) -> None:
        self.copies.extend(BlockCopy(copy.source, copy.target, copy.index, sequence.row) for copy in copies)

    def output(self, released_rows: list[int], shared_runs: SharedRuns) -> SchedulerOutput:
        return SchedulerOutput(
            step=self.step,
            started=tuple(self.started),
            continued=ContinuedRows(self.rows, self.num_tokens, self.block_offsets, self.block_ids),
            released=tuple(released_rows),
            copies=tuple(self.copies),
            fills=tuple(self.fills),
            shared_runs=shared_runs,
        )
