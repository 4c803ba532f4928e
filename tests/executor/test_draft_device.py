"""Drafts on the GPU's runner, computed by Triton's interpreter: given ones and those of a draft model, between steps that are launched and not waited for."""

from __future__ import annotations

import pytest
import torch
from test_executor_device_runner import MAX_ROWS, SIZE, SPEC, make_decoder, make_device_runner, make_torch_runner, start

from kvd.executor.gpu.triton_model import TritonModel
from kvd.executor.kv_pool import KvPool
from kvd.step import ContinuedRows, ExecutorOutput, SchedulerOutput
from kvd.types import SamplingParams

pytestmark = [pytest.mark.torch, pytest.mark.triton]

SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=4)]
PROMPTS = [[7 * index % 70 for index in range(21)], [5 * index % 60 for index in range(9)]]


def drive(runner, num_draft, launches, rounds):
    """Both rows from their prompts on; steps with and without drafts by turns. Without drafts a step is launched before the last one is collected."""
    blocks = [range(4), range(4, 8)]
    tokens, proposed = {0: [], 1: []}, 0

    def note(output):
        output = output if isinstance(output, ExecutorOutput) else output.result()
        assert output.failed_rows == ()
        assert output.short_drafts == ()
        for row, token_id in zip(output.rows, output.token_ids, strict=True):
            tokens[row].append(token_id)

    started = tuple(start(row, PROMPTS[row], blocks[row], sampling=SAMPLINGS[row], drafts=bool(row) and num_draft > 0) for row in (0, 1))
    note(runner.launch(SchedulerOutput(0, started, ContinuedRows())))
    for number in range(1, rounds + 1):
        for output in [runner.launch(SchedulerOutput(number, (), ContinuedRows([0, 1], [1, 1], [0, 0, 0], []))) for _ in range(launches)]:
            note(output)
        if num_draft:
            continued = ContinuedRows([0, 1], [1 + num_draft, num_draft], [0, 0, 0], [], [num_draft, num_draft - 1])
            note(runner.launch(SchedulerOutput(number, (), continued)))
            proposed += 2 * num_draft - 1
    return tokens, proposed


@pytest.mark.parametrize(
    ("seed", "rounds"), [(7, 1), pytest.param(7, 4, marks=pytest.mark.full), pytest.param(8, 4, marks=pytest.mark.full)]
)
def test_drafts_change_nothing_of_what_rows_say(seed, rounds):
    """The draft model is the target itself (seed 7), or has another head."""
    expected, _ = drive(make_torch_runner(), 0, 7, rounds)
    runner = make_device_runner()
    pool = KvPool(SPEC, 64, SIZE, torch.float32, "cpu")
    decoder = make_decoder()
    if seed != 7:
        decoder.weights.head.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
    limits = {"max_rows": MAX_ROWS, "max_model_len": 200}
    runner.attach_draft(TritonModel(SPEC, decoder.weights, pool, **limits), pool, max_tokens=64, max_positions=200)
    tokens, proposed = drive(runner, 3, 2, rounds)
    for row in (0, 1):
        assert tokens[row] == expected[row][: len(tokens[row])]
    num_plain = 2 * (1 + rounds * 2 + rounds)
    accepted = sum(map(len, tokens.values())) - num_plain
    assert accepted == (proposed if seed == 7 else accepted)
