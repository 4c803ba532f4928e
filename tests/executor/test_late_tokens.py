"""What a device sampled reaches the rows' state in order, and never a row that began since."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import numpy as np  # noqa: E402

from kvd.executor.input_batch import InputBatch  # noqa: E402
from kvd.executor.late_tokens import LateTokens  # noqa: E402


class Step:
    def __init__(self, *token_ids):
        self.token_ids = np.array(token_ids)
        self.is_done = False

    def done(self):
        return self.is_done

    def read(self):
        return self.token_ids


def expect(late, step, rows, positions):
    late.expect(np.array(rows), np.array(positions), done=step.done, read=step.read)


def test_tokens_are_taken_when_they_are_there():
    batch = InputBatch(3, 20, 4)
    late = LateTokens(batch)
    first, second = Step(7, 8), Step(9, 10)
    expect(late, first, [0, 2], [3, 5])
    expect(late, second, [0, 2], [4, 6])
    late.take(wait=False)
    assert not batch.token_ids.any()
    first.is_done = True
    late.take(wait=False)
    assert batch.token_ids[0, 3:5].tolist() == [7, 0]
    late.take(wait=True)
    assert batch.token_ids[0, 3:5].tolist() == [7, 9]
    assert batch.token_ids[2, 5:7].tolist() == [8, 10]


def test_a_row_that_began_since_keeps_its_own_tokens():
    batch = InputBatch(2, 20, 4)
    late = LateTokens(batch)
    expect(late, Step(7, 8), [0, 1], [3, 3])
    late.start(0)
    batch.token_ids[0, :6] = 5
    late.take(wait=True)
    assert batch.token_ids[0, :6].tolist() == [5] * 6
    assert batch.token_ids[1, 3] == 8
