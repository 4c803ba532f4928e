"""The draft model alone: what it holds of each block, what it catches up with, and that it proposes what the same model as target would take."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import random  # noqa: E402
from dataclasses import replace  # noqa: E402
from itertools import pairwise  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tiny_spec import LLAMA  # noqa: E402

from kvd.executor.attention.reference import ReferenceAttention  # noqa: E402
from kvd.executor.draft import DraftModel  # noqa: E402
from kvd.executor.input_batch import InputBatch  # noqa: E402
from kvd.executor.kv_pool import KvPool  # noqa: E402
from kvd.executor.models.decoder import Decoder, allocate_weights  # noqa: E402
from kvd.executor.runner import TorchRunner  # noqa: E402
from kvd.executor.sampling.columns import SamplingColumns  # noqa: E402
from kvd.executor.sampling.penalties import TokenCounts  # noqa: E402
from kvd.executor.step_model import TorchModel  # noqa: E402
from kvd.step import BlockCopy, ContinuedRows, SchedulerOutput, StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

SIZE = 4
VOCAB = 300
MAX_ROWS = 6
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=1.0, seed=11),
    "truncated": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5),
    "penalised": SamplingParams(temperature=1.2, repetition_penalty=1.4, frequency_penalty=0.3, seed=7),
}
SPEC = replace(LLAMA, hidden_size=32, intermediate_size=48, head_dim=8, max_positions=256, rms_norm_eps=1e-6)


def make_decoder(seed=7, poisoned=None):
    weights = allocate_weights(SPEC, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    tensors = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        tensors += [tensor for name in type(layer).__slots__ if (tensor := getattr(layer, name)) is not None]
    for tensor in tensors:
        tensor.normal_(0, 0.3, generator=generator).add_(1.0 if tensor.dim() == 1 else 0.0)
    if poisoned is not None:
        weights.embedding[poisoned] = float("nan")
    return Decoder(SPEC, weights)


class CountedModel:
    """Counts what is computed."""

    def __init__(self, model):
        self.model = model
        self.positions = []

    def forward(self, rows):
        self.positions.append(rows.attention.positions.tolist())
        return self.model.forward(rows)


class World:
    """A draft model with the state of rows that a target would bring; the target's own forward pass is left out."""

    def __init__(self, decoder=None, *, max_tokens=64, max_positions=200):
        self.pool = KvPool(SPEC, 64, SIZE, torch.float32, "cpu")
        self.pool.rows.fill_(0x7F)  # NaN-like garbage, as the last use may leave it
        self.model = CountedModel(TorchModel(decoder or make_decoder(), lambda pool: ReferenceAttention(SPEC, pool), self.pool))
        self.batch = InputBatch(MAX_ROWS, 240, SIZE)
        self.sampling = SamplingColumns(MAX_ROWS)
        self.counts = TokenCounts(MAX_ROWS, VOCAB, torch.device("cpu"))
        self.draft = DraftModel(
            self.model, self.pool, self.batch, self.sampling, self.counts, max_tokens=max_tokens, max_positions=max_positions
        )

    def step(self, started=(), rows=(), num_tokens=(), **more):
        step = SchedulerOutput(1, tuple(started), ContinuedRows(list(rows), list(num_tokens), [0] * (len(rows) + 1), []), **more)
        self.draft.apply(step)
        self.batch.apply(step)
        for each in started:
            self.sampling.start(each)
            if self.sampling.penalised(each.row):
                known = np.frombuffer(each.token_ids, dtype="<u4")
                self.counts.start(each.row, known[: each.num_prompt_tokens], known[each.num_prompt_tokens :])
        self.draft.follow(step)

    def add(self, row, *token_ids):
        for token_id in token_ids:
            self.batch.append(np.array([row]), [token_id])

    def propose(self, rows, num_draft):
        drafted = self.draft.propose(np.array(rows), np.array(num_draft))
        bounds = drafted.offsets.tolist()
        return [drafted.ids[begin:end].tolist() for begin, end in pairwise(bounds)]

    def verified(self, row, num_computed):
        self.batch.num_computed[row] = num_computed
        self.draft.rewind(np.array([row]), np.array([num_computed]))


def prompt_of(length, seed=0):
    return random.Random(seed).choices(range(1, VOCAB), k=length)


def start(tokens, block_ids, *, row=0, num_computed=0, num_tokens=None, sampling=GREEDY, **more):
    todo = len(tokens) - num_computed if num_tokens is None else num_tokens
    return StartedRow(row, pack_tokens(tokens), len(tokens), num_computed, todo, tuple(block_ids), sampling, **more)


def target_tokens(tokens, count, sampling, decoder=None):
    """What the model says alone."""
    runner = TorchRunner(decoder or make_decoder(), SPEC, KvPool(SPEC, 64, SIZE, torch.float32, "cpu"), max_rows=1, max_model_len=240)
    out = runner.execute(SchedulerOutput(1, (start(tokens, range(60), sampling=sampling),), ContinuedRows())).token_ids
    while len(out) < count:
        out += runner.execute(SchedulerOutput(1, (), ContinuedRows([0], [1], [0, 0], []))).token_ids
    return out


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("drafts", [False, True], ids=["catches-up", "follows"])
def test_a_model_proposes_what_it_would_take_as_target(name, drafts):
    world, sampling = World(), SAMPLINGS[name]
    prompt = prompt_of(21)
    expected = target_tokens(prompt, 8, sampling)
    world.step([start(prompt, range(10, 25), sampling=sampling, drafts=drafts)])
    assert len(world.model.positions) == drafts
    world.add(0, expected[0])
    assert world.propose([0], [4]) == [expected[1:5]]
    world.verified(0, 23)
    world.add(0, expected[1])
    if sampling.repetition_penalty != 1:
        world.counts.add(np.array([0]), np.array(expected[:1]))
    assert len(world.propose([0], [5])[0]) == 5


def test_rows_ask_for_different_numbers_and_one_pass_serves_them_all():
    world = World()
    rows = [0, 1, 2]
    prompts = [prompt_of(9 + 5 * row, row) for row in rows]
    world.step([start(prompts[row], range(20 * row, 20 * row + 12), row=row) for row in rows])
    expected = [target_tokens(prompt, 6, GREEDY) for prompt in prompts]
    for row in rows:
        world.add(row, expected[row][0])
    assert world.propose([2, 0, 1], [1, 4, 0]) == [expected[2][1:2], expected[0][1:5], []]
    assert len(world.model.positions) == 4
    assert sorted(world.model.positions[0]) == sorted([*range(10), *range(20)])
    assert world.draft.num_valid(1, 14) == 0


def test_what_the_target_did_not_take_is_forgotten_and_what_it_took_is_kept():
    world = World()
    prompt = prompt_of(9)
    expected = target_tokens(prompt, 8, GREEDY)
    world.step([start(prompt, range(12))])
    world.add(0, expected[0])
    assert world.propose([0], [6]) == [expected[1:7]]
    assert world.draft.num_valid(0, 15) == 15
    wrong = (expected[2] + 1) % VOCAB
    world.verified(0, 11)  # one draft taken, then another token than the second
    world.add(0, expected[1], wrong)
    assert world.draft.num_valid(0, 15) == 11
    world.model.positions.clear()
    assert world.propose([0], [2]) == [target_tokens([*prompt, expected[0], expected[1], wrong], 2, GREEDY)]
    assert world.model.positions == [[11], [12]]


def test_all_taken_leaves_only_the_last_two_to_compute():
    world = World()
    prompt = prompt_of(8)
    expected = target_tokens(prompt, 9, GREEDY)
    world.step([start(prompt, range(12))])
    world.add(0, expected[0])
    world.propose([0], [3])
    world.verified(0, 12)
    world.add(0, *expected[1:5])
    world.model.positions.clear()
    assert world.propose([0], [2]) == [expected[5:7]]
    assert world.model.positions == [[11, 12], [13]]


def test_a_hit_keeps_what_the_draft_model_computed_and_fresh_blocks_keep_nothing():
    world = World()
    prompt = prompt_of(20)
    world.step([start(prompt, range(10), drafts=True)])
    world.step(released=(0,))
    world.model.positions.clear()
    world.step([start([*prompt[:16], 3, 4, 5], [0, 1, 2, 3, 20, 21], row=1, num_computed=16)])
    world.add(1, 9)
    assert world.propose([1], [1]) == [target_tokens([*prompt[:16], 3, 4, 5, 9], 1, GREEDY)]
    assert world.model.positions == [[16, 17, 18, 19]]
    world.verified(1, 20)
    world.step([start(prompt_of(12, 5), [0, 1, 2, 30], row=2)], released=(1,))
    assert world.draft.num_valid(2, 12) == 0


def test_blocks_from_disk_are_caught_up_with():
    world = World()
    prompt = prompt_of(17)
    world.step([start(prompt, range(8), drafts=True)])
    world.draft.forget([1, 2])
    world.step([start([*prompt[:16], 8, 9], [0, 1, 2, 3, 20], row=1, num_computed=16)], released=(0,))
    assert world.draft.num_valid(1, 16) == 4
    world.add(1, 7)
    world.model.positions.clear()
    assert world.propose([1], [2]) == [target_tokens([*prompt[:16], 8, 9, 7], 2, GREEDY)]
    assert world.model.positions[0] == list(range(4, 19))


def test_a_copy_takes_along_what_is_valid_of_it_and_no_more_than_its_row_has():
    world = World()
    prompt = prompt_of(7)
    world.step([start(prompt, range(4), drafts=True)])
    fork = start([*prompt, 50], [0, 20, 21], row=1, num_computed=7, choice=1)
    world.step([fork], copies=(BlockCopy(1, 20, 1, 1),))
    world.add(1, 51)
    assert world.draft.num_valid(1, 9) == 7
    assert world.propose([1], [3]) == [target_tokens([*prompt, 50, 51], 3, GREEDY)]
    world.verified(1, 9)
    # a copy of the same block for a row that shares only its first two positions
    world.step([start([*prompt[:6], 60, 61], [0, 30, 31], row=2, num_computed=6)], copies=(BlockCopy(1, 30, 1, 2),))
    assert world.draft.num_valid(2, 7) == 6
    world.add(2, 62)
    assert world.propose([2], [2]) == [target_tokens([*prompt[:6], 60, 61, 62], 2, GREEDY)]


def test_a_long_prompt_is_caught_up_with_in_passes_of_bounded_size():
    world = World(max_tokens=16)
    prompt, short = prompt_of(40), prompt_of(6, 1)
    world.step([start(prompt, range(15)), start(short, range(20, 25), row=1)])
    expected = target_tokens(prompt, 4, GREEDY)
    world.add(0, expected[0])
    world.add(1, 5)
    reply = target_tokens([*short, 5], 2, GREEDY)
    assert world.propose([0, 1], [2, 2]) == [[], reply]
    assert [len(positions) for positions in world.model.positions] == [16, 1]
    world.verified(0, 41)
    world.add(0, expected[1])
    calls = 0
    while not (drafted := world.propose([0], [2])[0]):
        world.verified(0, 41)
        calls += 1
    assert drafted == expected[2:4]
    assert calls == 2
    assert max(len(positions) for positions in world.model.positions) <= 16


def test_rows_that_share_a_prefix_compute_it_once():
    world = World()
    prompt = prompt_of(16)
    world.step([start(prompt, range(6))])
    others = [start([*prompt, row], [0, 1, 2, 3, 20 + row], row=row, num_computed=16) for row in (1, 2)]
    world.step(others)
    for row in (0, 1, 2):
        world.add(row, 9)
    drafted = world.propose([0, 1, 2], [1, 1, 1])
    assert drafted == [target_tokens([*prompt, *more, 9], 1, GREEDY) for more in ([], [1], [2])]
    assert len(world.model.positions[0]) == 17 + 2 + 2


def test_a_row_that_follows_computes_its_prompt_chunk_by_chunk():
    world = World()
    prompt = prompt_of(23)
    world.step([start(prompt, range(8), num_tokens=10, drafts=True)])
    world.step([], [0], [13])
    assert [len(positions) for positions in world.model.positions] == [10, 13]
    world.add(0, 7)
    world.step([], [0], [1])  # a decoded token costs the draft model nothing
    assert len(world.model.positions) == 2


def test_beyond_the_drafts_positions_nothing_is_drafted():
    world = World(max_positions=12)
    prompt = prompt_of(10)
    world.step([start(prompt, range(6))])
    world.add(0, 5)
    assert len(world.propose([0], [4])[0]) == 2
    assert max(max(positions) for positions in world.model.positions) == 11
    world.verified(0, 11)
    world.add(0, 6, 7, 8)
    assert world.propose([0], [4]) == [[]]


def test_a_draft_that_is_not_finite_ends_the_rows_drafting_and_leaves_no_trace():
    decoder = make_decoder(poisoned=77)
    world = World(decoder)
    good = prompt_of(9, 3)
    world.step([start([5, 77, 6], [0, 1]), start(good, range(4, 10), row=1)])
    world.add(0, 5)
    world.add(1, 5)
    assert world.propose([0, 1], [3, 3]) == [[], target_tokens([*good, 5], 3, GREEDY)]
    assert world.draft.num_valid(0, 4) == 0
    assert not world.pool.rows[0].any()
    world.verified(0, 3)
    assert world.propose([0], [3]) == [[]]
    world.step([start([5, 8, 6], [0, 1])], released=(0,))
    world.add(0, 5)
    assert world.propose([0], [3]) == [target_tokens([5, 8, 6, 5], 3, GREEDY)]


def test_a_near_model_is_right_more_often_than_a_stranger():
    prompt = prompt_of(12)
    weights = make_decoder()
    expected = target_tokens(prompt, 40, SAMPLINGS["seeded"])

    def num_right(decoder):
        world, right = World(decoder), 0
        world.step([start(prompt, range(20), sampling=SAMPLINGS["seeded"])])
        for nth, token_id in enumerate(expected[:-1]):
            world.add(0, token_id)
            right += world.propose([0], [1])[0] == [expected[nth + 1]]
            world.verified(0, len(prompt) + nth)
        return right

    near = make_decoder()
    generator = torch.Generator().manual_seed(3)
    for layer in near.weights.layers:
        layer.down.add_(torch.empty_like(layer.down).normal_(0, 0.02, generator=generator))
    assert num_right(weights) == 39
    assert num_right(near) > 30
    assert num_right(make_decoder(seed=99)) < 10


def test_is_rejection_and_follows_are_those_of_the_row_that_started_last():
    world = World()
    world.step([start(prompt_of(5), [0, 1], drafts=True)])
    world.step([replace(start(prompt_of(6), [2, 3]), drafts=False)], released=(0,))
    assert len(world.model.positions) == 1
