"""Row state between steps: deltas in, flat inputs out, against a plain dictionary of lists."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import random  # noqa: E402

from kvd.executor.input_batch import BatchError, InputBatch  # noqa: E402
from kvd.step import BlockCopy, ContinuedRows, SchedulerOutput, SharedRuns, StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

SIZE = 4


def start(row, tokens, block_ids, num_tokens, num_computed=0):
    return StartedRow(row, pack_tokens(tokens), len(tokens), num_computed, num_tokens, tuple(block_ids), SamplingParams())


def step(started=(), rows=(), num_tokens=(), blocks=None, released=(), copies=()):
    offsets, ids = [0], []
    for appended in blocks if blocks is not None else [()] * len(rows):
        ids += appended
        offsets.append(len(ids))
    return SchedulerOutput(0, tuple(started), ContinuedRows(list(rows), list(num_tokens), offsets, ids), tuple(released), tuple(copies))


class Plain:
    """The same bookkeeping with lists."""

    def __init__(self):
        self.tokens, self.blocks, self.computed = {}, {}, {}

    def inputs(self, laid_out):
        flat = []
        for row, count in zip(laid_out.rows.tolist(), laid_out.attention.num_tokens.tolist(), strict=True):
            at = self.computed[row]
            flat += [(row, position, self.tokens[row][position], self.blocks[row][position // SIZE]) for position in range(at, at + count)]
            self.computed[row] += count
        return flat


def flat_of(laid_out):
    attention = laid_out.attention
    rows = laid_out.rows[attention.token_rows].tolist()
    blocks = attention.block_tables[attention.token_rows, attention.positions // SIZE].tolist()
    return list(zip(rows, attention.positions.tolist(), laid_out.token_ids.tolist(), blocks, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_lay_out_what_the_deltas_say(seed):
    rng = random.Random(seed)
    batch, plain = InputBatch(8, 60, SIZE), Plain()
    for _ in range(60):
        released = [row for row in plain.tokens if rng.random() < 0.1]
        for row in released:
            del plain.tokens[row], plain.blocks[row], plain.computed[row]
        copies = []
        for row in plain.tokens:
            if rng.random() < 0.2:
                index, target = rng.randrange(len(plain.blocks[row])), rng.randrange(1000)
                copies.append(BlockCopy(plain.blocks[row][index], target, index, row))
                plain.blocks[row][index] = target
        rows, counts, appended = [], [], []
        for row, tokens in plain.tokens.items():
            todo = len(tokens) - plain.computed[row]
            if rng.random() < 0.8 and len(tokens) < 60:
                rows.append(row)
                counts.append(rng.randint(1, todo))
                needed = -(-(plain.computed[row] + counts[-1]) // SIZE) - len(plain.blocks[row])
                appended.append([rng.randrange(1000) for _ in range(max(0, needed))])
                plain.blocks[row] += appended[-1]
        started = []
        for row in range(8):
            if row not in plain.tokens and rng.random() < 0.3:
                length = rng.randint(1, 30)
                computed = rng.randrange(length)
                plain.tokens[row] = [rng.randrange(50_000) for _ in range(length)]
                plain.blocks[row] = [rng.randrange(1000) for _ in range(-(-length // SIZE))]
                plain.computed[row] = computed
                started.append(start(row, plain.tokens[row], plain.blocks[row], rng.randint(1, length - computed), computed))
        laid_out = batch.apply(step(started, rows, counts, appended, released, copies))
        assert sorted(laid_out.rows.tolist()) == sorted([*rows, *(begun.row for begun in started)])
        attention = laid_out.attention
        keys = list(zip(attention.num_tokens.tolist(), attention.num_computed.tolist(), strict=True))
        assert keys == sorted(keys)
        before = dict(plain.computed)
        assert flat_of(laid_out) == plain.inputs(laid_out)
        fresh = set()
        for row in laid_out.rows.tolist():
            last = (plain.computed[row] - 1) // SIZE
            if before[row] <= last * SIZE and plain.computed[row] % SIZE:
                fresh.add(plain.blocks[row][last])
        assert set(laid_out.fresh_blocks.tolist()) == fresh
        reached = laid_out.rows[laid_out.samples]
        assert sorted(reached.tolist()) == sorted(row for row in laid_out.rows.tolist() if plain.computed[row] == len(plain.tokens[row]))
        sampled = [rng.randrange(50_000) for _ in reached]
        batch.append(reached, sampled)
        for row, token_id in zip(reached.tolist(), sampled, strict=True):
            plain.tokens[row].append(token_id)


def test_a_row_that_starts_in_the_step_of_its_copy_keeps_the_table_it_brings():
    batch = InputBatch(2, 16, SIZE)
    batch.apply(step([start(0, [1, 2, 3, 4, 5], [7, 8], 5)]))
    laid_out = batch.apply(
        step([start(1, [1, 2, 3, 4, 5, 6], [7, 9], 1, 5)], released=[0], copies=[BlockCopy(8, 9, 1, 1), BlockCopy(8, 5, 1, 0)])
    )
    assert laid_out.attention.block_tables.tolist() == [[7, 9]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: step(rows=[1], num_tokens=[1]), "row 1: 1 tokens after 0 computed, with 0 known"),
        (lambda: step(rows=[0], num_tokens=[1]), "row 0: 1 tokens after 3 computed, with 3 known"),
        (lambda: step([start(1, [1] * 9, [3, 4], 9)]), "9 known and 2 blocks"),
        (lambda: step([start(1, [1], [0], 0)]), "0 tokens"),
        (lambda: step([start(1, [1] * 18, [3] * 5, 1)]), "starts with 18 tokens"),
        (lambda: step([start(1, [], [3], 1)]), "starts with 0 tokens"),
        (lambda: step(rows=[0], num_tokens=[1], blocks=[[1, 2, 3, 4, 5]]), "outgrows 5 blocks"),
    ],
)
def test_a_step_that_contradicts_the_state_is_refused(wrong, message):
    batch = InputBatch(2, 16, SIZE)
    batch.apply(step([start(0, [1, 2, 3], [7], 3)]))
    with pytest.raises(BatchError, match=message):
        batch.apply(wrong())


def shared(batch, started=(), rows=(), runs=None, num_tokens=1):
    """A step's runs as (start, end, the scheduler's row numbers), and the arrays themselves."""
    continued = ContinuedRows(list(rows), [num_tokens] * len(rows), [0] * (len(rows) + 1), [])
    laid_out = batch.apply(SchedulerOutput(0, tuple(started), continued, shared_runs=runs))
    for row in started:
        batch.append([row.row], [1])
    batch.append(list(rows), [1] * len(rows))
    attention = laid_out.attention
    offsets = attention.run_offsets
    told = [
        (int(attention.run_start[i]), int(attention.run_end[i]), laid_out.rows[attention.run_rows[offsets[i] : offsets[i + 1]]].tolist())
        for i in range(len(attention.run_start))
    ]
    return told, attention


def test_shared_runs_are_laid_out_over_the_steps_rows():
    batch = InputBatch(8, 60, SIZE)
    runs = SharedRuns([0, 4], [4, 6], [0, 4, 6], [5, 2, 7, 3, 7, 5])
    # 7 has computed more than 5, and comes behind it; 2 is not in the step, and 3 runs a longer chunk
    rows = [start(row, range(40), range(10), 1, computed) for row, computed in ((7, 30), (5, 25))]
    rows.append(start(3, range(40), range(10), 6, 20))
    told, attention = shared(batch, rows, runs=runs)
    assert told == [(0, 16, [5, 7, 3]), (16, 24, [5, 7])]
    assert all(array.dtype == "int64" for array in (attention.run_start, attention.run_end, attention.run_offsets, attention.run_rows))
    assert shared(batch, rows=[5], runs=runs)[0] == [], "one row shares with nobody"


def test_the_same_runs_and_rows_reuse_the_arrays():
    batch = InputBatch(8, 60, SIZE)
    runs = SharedRuns([0], [2], [0, 2], [0, 1])
    started = [start(row, range(12), range(9), 12 - 8 - row, 8 + row) for row in (0, 1)]
    shared(batch, started, runs=runs)
    _, first = shared(batch, rows=[0, 1], runs=runs)
    _, second = shared(batch, rows=[0, 1], runs=runs)
    assert second.run_rows is first.run_rows
    others = SharedRuns([0], [1], [0, 2], [0, 1])
    assert shared(batch, rows=[0, 1], runs=others)[0] == [(0, 4, [0, 1])]


def test_a_run_beyond_what_a_row_has_computed_is_refused():
    batch = InputBatch(8, 60, SIZE)
    started = [start(0, range(12), range(3), 4, 8), start(1, range(12), range(3), 8, 4)]
    with pytest.raises(BatchError, match="row 1: 4 positions are computed, a shared run claims more"):
        shared(batch, started, runs=SharedRuns([0], [2], [0, 2], [0, 1]))
