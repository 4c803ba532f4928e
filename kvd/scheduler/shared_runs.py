"""Which rows hold the same blocks: a tree of runs over the rows' block tables, kept as rows come and go.

Two tables that hold a block both hold it at the same place, with the same blocks before it: blocks are shared by matching a prefix or by forking, and a table
changes only at its end, where nobody shares. So the rows form a radix tree over block ids. Its inner nodes are the runs; a row's *tail*, what it
holds alone, hangs at the last of them and costs nothing from step to step: its next block is looked at when a new row brings more than the runs hold.

A row brings the number of its blocks that were computed before its first step, all of what it matched or was forked from. Nobody who came before it holds
any of the others, and whoever comes after it brings its own number; hence the longest common prefix of two rows never exceeds what the later of them brought.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from kvd.step import NO_SHARED_RUNS, SharedRuns
from kvd.types import BlockId


class _Run:
    """Blocks ``first:first + len(block_ids)`` of every row in ``rows``, tails and rows of children alike."""

    __slots__ = ("block_ids", "children", "first", "parent", "rows", "tails")

    def __init__(self, parent: _Run | None, first: int, block_ids: Sequence[BlockId], rows: dict[int, None]) -> None:
        self.parent = parent
        self.first = first
        self.block_ids = block_ids
        self.rows = rows
        self.children: dict[BlockId, _Run] = {}
        """By their first block."""
        self.tails: dict[int, Sequence[BlockId]] = {}
        """The tables of the rows that share nothing beyond this run."""

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)


class RunTree:
    """The live rows' runs. ``tile_blocks``: runs are told in multiples of so many blocks.

    Adding or removing a row costs the runs on its path and one comparison of its blocks with theirs; a row that brings more than they hold also costs a look at
    one block of each row whose tail hangs at the last of them. In between ``current`` returns the same object.
    """

    def __init__(self, tile_blocks: int) -> None:
        self._tile_blocks = tile_blocks
        self._root = _Run(None, 0, (), {})
        self._places: dict[int, _Run] = {}
        self._current: SharedRuns | None = NO_SHARED_RUNS

    def __len__(self) -> int:
        return len(self._places)

    def add(self, row: int, block_ids: Sequence[BlockId], num_blocks: int) -> None:
        """A row begins; the first ``num_blocks`` blocks of its table (kept, and read as it is later on) were computed before the next step."""
        assert row not in self._places, "a row begins once"
        run = self._descend(self._root, block_ids, num_blocks)
        self._hang(run, row, block_ids)
        above = run.parent
        while above is not None:  # a run all of whose rows came along is one with that below it
            above_that = above.parent
            self._dissolve_if_superfluous(above)
            above = above_that

    def remove(self, row: int) -> None:
        """A row ends; nothing if it is not there."""
        run = self._places.pop(row, None)
        if run is None:
            return
        del run.tails[row]
        if run.parent is not None:
            self._current = None
        above: _Run | None = run
        while above is not None:
            del above.rows[row]
            above = above.parent
        self._dissolve_if_superfluous(run)

    def current(self) -> SharedRuns:
        """The runs as they stand, in whole tiles, from the first block on."""
        if self._current is None:
            self._current = self._collect()
        return self._current

    # ------------------------------------------------------------------------------------------------ changes of the tree

    def _descend(self, run: _Run, block_ids: Sequence[BlockId], num_blocks: int) -> _Run:
        """The last run below ``run`` of which a table with these first blocks holds all, cut or made as need be."""
        while run.end < num_blocks:
            child = run.children.get(block_ids[run.end]) or self._join_tails(run, block_ids, num_blocks)
            if child is None:
                break
            num_common = _common(child.block_ids, 0, block_ids, child.first, num_blocks)
            if num_common < len(child.block_ids):
                return self._split(child, num_common)
            run = child
        return run

    def _hang(self, run: _Run, row: int, block_ids: Sequence[BlockId]) -> None:
        run.tails[row] = block_ids
        self._places[row] = run
        if run.parent is not None:
            self._current = None
        above: _Run | None = run
        while above is not None:
            above.rows[row] = None
            above = above.parent

    def _join_tails(self, run: _Run, block_ids: Sequence[BlockId], num_blocks: int) -> _Run | None:
        """Rows whose tails begin with the newcomer's next block get a run below ``run``, as far as they share it with the newcomer; None if there are none.

        There may be several: while the block was being computed, none of them brought it.
        """
        end = run.end
        wanted = block_ids[end]
        found = [(row, table) for row, table in run.tails.items() if len(table) > end and table[end] == wanted]
        for row, table in found:
            del run.tails[row]
            if wanted in run.children:
                self._hang(self._descend(run, table, min(num_blocks, len(table))), row, table)
            else:
                num_common = _common(table, end, block_ids, end, num_blocks)
                run.children[wanted] = _Run(run, end, block_ids[end : end + num_common], {})
                self._hang(run.children[wanted], row, table)
        return run.children.get(wanted)

    def _split(self, run: _Run, num_blocks: int) -> _Run:
        """Cut a run after ``num_blocks`` of its blocks; the upper part."""
        assert run.parent is not None, "the root has no blocks"
        upper = _Run(run.parent, run.first, run.block_ids[:num_blocks], dict(run.rows))
        run.parent.children[upper.block_ids[0]] = upper
        run.parent, run.first, run.block_ids = upper, run.first + num_blocks, run.block_ids[num_blocks:]
        upper.children[run.block_ids[0]] = run
        return upper

    def _dissolve_if_superfluous(self, run: _Run) -> None:
        """A run with one branch left goes: its child takes its blocks over, or its last row's tail begins earlier. The one above has as many branches as before."""
        parent = run.parent
        if parent is None or len(run.tails) + len(run.children) != 1:
            return
        if run.children:
            (child,) = run.children.values()
            child.parent, child.first, child.block_ids = parent, run.first, [*run.block_ids, *child.block_ids]
            parent.children[run.block_ids[0]] = child
        else:
            del parent.children[run.block_ids[0]]
            for row, table in run.tails.items():
                parent.tails[row] = table
                self._places[row] = parent

    # ---------------------------------------------------------------------------------------------------- what is told

    def _collect(self) -> SharedRuns:
        told = SharedRuns()
        tile = self._tile_blocks
        stack = [(run, 0) for run in self._root.children.values()]
        while stack:
            run, first = stack.pop()
            end = run.end // tile * tile
            if end > first:
                told.first_block.append(first)
                told.end_block.append(end)
                told.rows.extend(run.rows)
                told.row_offsets.append(len(told.rows))
                first = end
            stack.extend((child, first) for child in run.children.values())
        return told if told.rows else NO_SHARED_RUNS

    # ----------------------------------------------------------------------------------------------------------- audits

    def check_invariants(self, tables: dict[int, tuple[Sequence[BlockId], int]], followers: Collection[int] = ()) -> None:
        """Compare with the definition. ``tables``: each live row's block ids, and how many of its blocks are computed by now; ``followers``: rows that were
        added with fewer blocks than they share.
        """
        assert self._places.keys() == tables.keys(), "a row is missing or left over"
        self._check_nodes()
        reached = {row: self._told_blocks(row, tables) for row in tables}
        for left, right in itertools.combinations(tables, 2):
            shared = _common(tables[left][0], 0, tables[right][0], 0, min(tables[left][1], tables[right][1]))
            told = len(reached[left] & reached[right])
            assert told <= shared, f"rows {left} and {right} share {shared} blocks, {told} are told"
            if left not in followers and right not in followers:
                assert told == shared // self._tile_blocks * self._tile_blocks, (
                    f"rows {left} and {right} share {shared} blocks, {told} are told"
                )

    def _told_blocks(self, row: int, tables: dict[int, tuple[Sequence[BlockId], int]]) -> set[tuple[int, int]]:
        """The row's runs and their blocks' places."""
        told: set[tuple[int, int]] = set()
        current = self.current()
        for number, (first, end) in enumerate(zip(current.first_block, current.end_block, strict=True)):
            rows = current.rows[current.row_offsets[number] : current.row_offsets[number + 1]]
            assert first < end, "an empty run"
            assert first % self._tile_blocks == end % self._tile_blocks == 0, "a run begins or ends within a tile"
            assert len(set(rows)) == len(rows) >= 2, "a run of fewer than two rows"
            if row in rows:
                assert first == len(told), "a row's runs overlap, or leave a hole"
                assert end <= tables[row][1], f"row {row} shares what it has not computed"
                assert all(tables[each][0][first:end] == tables[row][0][first:end] for each in rows), "the rows of a run hold other blocks"
                told.update((number, place) for place in range(first, end))
        return told

    def _check_nodes(self) -> None:
        stack = [self._root]
        while stack:
            run = stack.pop()
            rows = set(run.tails)
            for key, child in run.children.items():
                assert child.parent is run, "a run hangs elsewhere"
                assert child.block_ids[0] == key, "a run is filed under another block"
                assert child.first == run.end, "a hole between two runs"
                assert rows.isdisjoint(child.rows), "a row hangs twice"
                rows |= set(child.rows)
            assert rows == set(run.rows), "a run's rows are miscounted"
            assert run is self._root or len(run.tails) + len(run.children) >= 2, "a run with one branch"
            assert all(self._places[row] is run for row in run.tails), "a row's place is wrong"
            stack.extend(run.children.values())


def _common(left: Sequence[BlockId], left_first: int, right: Sequence[BlockId], right_first: int, right_end: int) -> int:
    """Length of the common prefix of ``left[left_first:]`` and ``right[right_first:right_end]``."""
    length = min(len(left) - left_first, right_end - right_first)
    if left[left_first : left_first + length] == right[right_first : right_first + length]:
        return length
    return next(at for at in range(length) if left[left_first + at] != right[right_first + at])
