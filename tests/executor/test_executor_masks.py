"""Masks in the sampler and in runners: nothing forbidden is drawn, what is allowed keeps its distribution, and other rows draw what they draw alone."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import itertools  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from kvd.executor.sampling.columns import SamplingColumns  # noqa: E402
from kvd.executor.sampling.masks import DrawMasks, StepMasks  # noqa: E402
from kvd.executor.sampling.penalties import TokenCounts  # noqa: E402
from kvd.executor.sampling.sampler import sample  # noqa: E402
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow, TokenMasks  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

VOCAB = 77
NUM_WORDS = -(-VOCAB // 32)


def words(*allowed):
    return b"".join(sum(1 << token for token in tokens).to_bytes(4 * NUM_WORDS, "little") for tokens in allowed)


def masks(entries):
    """``{row: [allowed, …]}``"""
    return TokenMasks(
        list(entries), [len(each) for each in entries.values()], NUM_WORDS, words(*itertools.chain.from_iterable(entries.values()))
    )


def started(row, sampling, **more):
    return StartedRow(row, pack_tokens([1, 2, 3]), 3, 0, 3, (), sampling, **more)


def draw(logits, rows, entries, positions=None):
    """Token ids, log-probabilities and who is stuck, for ``rows`` under their masks."""
    columns = SamplingColumns(8)
    for row in rows:
        columns.start(row)
    columns.begin_step(SchedulerOutput(1, (), ContinuedRows(), masks=masks(entries)))
    numbers = np.array([row.row for row in rows] if positions is None else [rows[0].row] * len(positions))
    draws, index = columns.draws(
        numbers, np.array(positions if positions is not None else [3] * len(rows)), np.zeros((8, 16), dtype=np.int32)
    )
    return sample(logits[torch.from_numpy(index)].clone(), draws, TokenCounts(8, VOCAB, torch.device("cpu")))


SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3, seed=3),
    SamplingParams(temperature=0.8, top_k=2, seed=4),
    SamplingParams(temperature=1.0, top_p=0.5, seed=5),
    SamplingParams(temperature=1.0, min_p=0.2, seed=6),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_only_what_is_allowed_is_drawn(sampling):
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    allowed = [[0], [76], [3, 31, 32], [63, 64], list(range(40, 77))]
    rows = [started(row, sampling) for row in range(5)]
    drawn = draw(logits, rows, dict(enumerate([each] for each in allowed))).token_ids
    assert all(token in each for token, each in zip(drawn.tolist(), allowed, strict=True))
    if sampling.temperature == 0:
        best = [max(each, key=lambda token, row=row: float(logits[row, token])) for row, each in enumerate(allowed)]
        assert drawn.tolist() == best


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_without_a_mask_draw_what_they_draw_alone(sampling):
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    rows = [started(row, sampling) for row in range(4)]
    alone = draw(logits, rows, {7: [[1]]}).token_ids
    beside = draw(logits, rows, {1: [[5]], 3: [[6]]}).token_ids
    assert beside.tolist() == [alone[0], 5, alone[2], 6]


def test_a_mask_that_allows_everything_changes_nothing():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    rows = [started(row, SamplingParams(seed=row)) for row in range(4)]
    free = draw(logits, rows, {7: [[1]]}).token_ids
    assert draw(logits, rows, {row: [list(range(VOCAB))] for row in range(4)}).token_ids.tolist() == free.tolist()


def test_log_probabilities_are_the_models_own():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    drawn = draw(logits, [started(0, SamplingParams(temperature=0.0, num_logprobs=2))], {0: [[9]]})
    (entry,) = drawn.logprobs
    expected = torch.log_softmax(logits, dim=-1)[0]
    assert entry.token_id == 9
    assert entry.logprob == pytest.approx(float(expected[9]))
    assert entry.top[0][0] == int(expected.argmax())


def test_choices_of_a_row_share_its_mask():
    logits = torch.zeros(1, VOCAB)
    drawn = draw(logits, [started(0, SamplingParams(seed=1), num_choices=5)], {0: [[8, 9]]}).token_ids
    assert len(drawn) == 5
    assert set(drawn.tolist()) <= {8, 9}


def test_positions_of_a_row_take_its_masks_in_order():
    logits = torch.zeros(3, VOCAB)
    row = started(2, SamplingParams(temperature=0.0))
    assert draw(logits, [row], {2: [[5], [6], [7]]}, positions=[3, 4, 5]).token_ids.tolist() == [5, 6, 7]
    step_masks = StepMasks(masks({4: [[1]], 2: [[5], [6]]}), 8)
    found = step_masks.of(np.array([2, 4, 2, 0]), np.array([10, 4, 11, 3]))
    assert found.draws.tolist() == [0, 1, 2]
    assert found.octets.tobytes() == words([5], [1], [6])


def test_what_lists_and_mask_leave_together_is_drawn_and_nothing_is_stuck_alone():
    logits = torch.zeros(3, VOCAB)
    rows = [
        started(0, SamplingParams(allowed_token_ids=(4, 5))),
        started(1, SamplingParams(banned_token_ids=(6,))),
        started(2, SamplingParams(banned_token_ids=(7, 8))),
    ]
    drawn = draw(logits, rows, {0: [[5, 6]], 1: [[6, 9]], 2: [[7, 8]]})
    assert drawn.token_ids[:2].tolist() == [5, 9]
    assert drawn.stuck.tolist() == [False, False, True]


def test_a_vocabulary_that_is_no_multiple_of_32():
    for vocab in (1, 8, 31, 32, 33, 63, 64, 65):
        num_words = -(-vocab // 32)
        octets = np.frombuffer(b"\xff" * 4 * num_words, dtype=np.uint8).reshape(1, -1).copy()
        logits = torch.zeros(1, vocab)
        DrawMasks(np.array([0]), octets).forbid(logits)
        assert (logits == 0).all()
        DrawMasks(np.array([0]), octets * 0).forbid(logits)
        assert (logits == float("-inf")).all()
