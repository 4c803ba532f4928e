"""A target and a draft model in one runner: whatever the draft is worth, the output is the target's alone."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import random  # noqa: E402
from collections import Counter  # noqa: E402
from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
from native_runner import native_decoder  # noqa: E402
from tiny_spec import LLAMA  # noqa: E402

from kvd.executor.attention.reference import ReferenceAttention  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.kv_pool import KvPool  # noqa: E402
from kvd.executor.models.decoder import Decoder, allocate_weights  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool  # noqa: E402
from kvd.executor.native_model import NativeModel  # noqa: E402
from kvd.executor.native_runner import NativeRunner  # noqa: E402
from kvd.executor.runner import TorchRunner  # noqa: E402
from kvd.executor.step_model import TorchModel  # noqa: E402
from kvd.step import ContinuedRows, ExecutorOutput, SchedulerOutput, StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

SIZE = 16
VOCAB = 300
BLOCKS_A_ROW = 10
KERNELS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(native.status().isa is None, reason="the native kernels are not there")),
]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=11),
    "truncated": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5),
    "penalised": SamplingParams(temperature=1.1, repetition_penalty=1.4, frequency_penalty=0.3, seed=7),
    "ruled": SamplingParams(temperature=1.0, seed=2, logit_bias=((5, 4.0),), banned_token_ids=(7, 8, 9), bad_words=((5, 5),)),
    "log-probabilities": SamplingParams(temperature=0.7, seed=9, num_logprobs=2),
}
SPEC = replace(LLAMA, hidden_size=32, intermediate_size=48, max_positions=256, rms_norm_eps=1e-6)


def make_weights(seed=7, noise=0.0, poisoned=None):
    weights = allocate_weights(SPEC, dtype=torch.float32, device=torch.device("cpu"))
    generator, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(77)
    tensors = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        tensors += [tensor for name in type(layer).__slots__ if (tensor := getattr(layer, name)) is not None]
    for tensor in tensors:
        tensor.normal_(0, 0.3, generator=generator).add_(1.0 if tensor.dim() == 1 else 0.0)
        if noise:
            tensor.add_(torch.empty_like(tensor).normal_(0, noise, generator=other))
    if poisoned is not None:
        weights.embedding[poisoned] = float("nan")
    return weights


DRAFTS = {"itself": {}, "near": {"noise": 0.01}, "far": {"noise": 0.05}, "stranger": {"seed": 99}, "poisoned": {"poisoned": 50}}


def model_of(kernels, weights, num_blocks):
    if kernels == "native":
        pool = NativeKvPool(SPEC, num_blocks, "float32")
        return NativeModel(native_decoder(SPEC, weights, torch.float32, 240), pool), pool
    pool = KvPool(SPEC, num_blocks, SIZE, torch.float32, "cpu")
    return TorchModel(Decoder(SPEC, weights), lambda pool: ReferenceAttention(SPEC, pool), pool), pool


class Pair:
    """A runner, with a draft model or without, that is driven as a scheduler would."""

    def __init__(self, kernels, draft=None, num_rows=4, max_tokens=64):
        num_blocks = num_rows * BLOCKS_A_ROW
        if kernels == "native":
            model, pool = model_of(kernels, make_weights(), num_blocks)
            self.runner = NativeRunner(model, pool, VOCAB, max_rows=num_rows, max_model_len=240)
        else:
            pool = KvPool(SPEC, num_blocks, SIZE, torch.float32, "cpu")
            self.runner = TorchRunner(Decoder(SPEC, make_weights()), SPEC, pool, max_rows=num_rows, max_model_len=240)
        if draft is not None:
            model, pool = model_of(kernels, make_weights(**DRAFTS[draft]), num_blocks)
            self.runner.attach_draft(model, pool, max_tokens=max_tokens, max_positions=240)
        self.number = 0
        self.tokens = {}
        self.drafted = self.accepted = 0
        self.short = []

    def step(self, started=(), rows=(), num_draft=None, launch=False):
        self.number += 1
        drafts = num_draft or [0] * len(rows)
        continued = ContinuedRows(list(rows), [1 + count for count in drafts], [0] * (len(rows) + 1), [], num_draft or [])
        output = self.runner.launch(SchedulerOutput(self.number, tuple(started), continued))
        if launch and not isinstance(output, ExecutorOutput):
            return output
        return self.note(output, dict(zip(rows, drafts, strict=True)))

    def note(self, output, drafts=()):
        output = output if isinstance(output, ExecutorOutput) else output.result()
        assert output.failed_rows == ()
        self.short += output.short_drafts
        for row, token_id in zip(output.rows, output.token_ids, strict=True):
            self.tokens.setdefault(row, []).append(token_id)
        proposed = dict(drafts) | dict(output.short_drafts)
        self.drafted += sum(proposed.values())
        self.accepted += sum(max(0, output.rows.count(row) - 1) for row, count in proposed.items() if count)
        return output

    def start(self, row, prompt, sampling, **more):
        blocks = tuple(range(row * BLOCKS_A_ROW, (row + 1) * BLOCKS_A_ROW))
        return StartedRow(row, pack_tokens(prompt), len(prompt), 0, len(prompt), blocks, sampling, **more)


def prompt_of(length, seed=0):
    return random.Random(seed).choices([token for token in range(1, VOCAB) if token != 50], k=length)


def plain_tokens(kernels, prompts, samplings, count):
    pair = Pair(kernels)
    pair.step([pair.start(row, prompt, samplings[row]) for row, prompt in enumerate(prompts)])
    while len(pair.tokens[0]) < count:
        pair.step(rows=range(len(prompts)))
    return pair.tokens


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("drafts", [False, True], ids=["catches-up", "follows"])
@pytest.mark.parametrize("draft", [draft for draft in DRAFTS if draft != "far"])
def test_rows_of_every_kind_say_what_they_say_without_a_draft(kernels, draft, drafts):
    samplings = list(SAMPLINGS.values())
    for first in (0, 3):
        kinds = samplings[first : first + 3]
        prompts = [prompt_of(11 + 13 * row, row) for row in range(3)]
        expected = plain_tokens(kernels, prompts, kinds, 18)
        pair = Pair(kernels, draft)
        pair.step([pair.start(row, prompt, kinds[row], drafts=drafts) for row, prompt in enumerate(prompts)])
        rng = random.Random(first)
        while any(len(pair.tokens[row]) < 18 for row in range(3)):
            rows = [row for row in range(3) if len(pair.tokens[row]) < 18]
            pair.step(rows=rows, num_draft=[rng.randrange(5) for _ in rows])
        assert {row: tokens[:18] for row, tokens in pair.tokens.items()} == {row: tokens[:18] for row, tokens in expected.items()}
        if draft == "itself":
            assert pair.accepted == pair.drafted
        elif draft == "near":
            assert pair.accepted > pair.drafted * 0.3
        elif draft == "stranger":
            assert pair.accepted < pair.drafted * 0.5


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_that_decoded_plainly_may_draft_later(kernels):
    """What the queue sampled meanwhile is known to the draft model; plain rows stay in the queue."""
    prompts = [prompt_of(20), prompt_of(9, 1)]
    kinds = [SAMPLINGS["seeded"], SAMPLINGS["greedy"]]
    expected = plain_tokens(kernels, prompts, kinds, 24)
    pair = Pair(kernels, "itself")
    pair.step([pair.start(row, prompt, kinds[row]) for row, prompt in enumerate(prompts)])
    for _ in range(3):
        pending = [pair.step(rows=[0, 1], launch=True) for _ in range(2)]
        for each in pending:
            if kernels == "native":
                pair.note(each)
        pair.step(rows=[0, 1], num_draft=[3, 0])
    assert pair.tokens[0][:19] == expected[0][:19]
    assert pair.tokens[1][:10] == expected[1][:10]
    assert (pair.drafted, pair.accepted) == (9, 9)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_that_is_restarted_in_a_step_that_drafts_keeps_its_own_tokens(kernels):
    prompts = [prompt_of(20), prompt_of(9, 1)]
    kinds = [SAMPLINGS["seeded"], SAMPLINGS["greedy"]]
    expected = plain_tokens(kernels, prompts, kinds, 12)
    pair = Pair(kernels, "itself")
    pair.step([pair.start(row, prompt, kinds[row]) for row, prompt in enumerate(prompts)])
    pending = pair.step(rows=[1], launch=True)
    again = pair.start(1, [*prompts[1], *expected[1][:2]], kinds[1], drafts=True)
    pair.step([again], rows=[0], num_draft=[4])
    if kernels == "native":
        pair.note(pending)
    pair.step(rows=[0, 1], num_draft=[2, 3])
    assert sorted(pair.tokens[1]) == sorted(expected[1][:7])
    assert pair.tokens[0] == expected[0][:9]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_draft_that_still_catches_up_is_told_as_short(kernels):
    prompt = prompt_of(60)
    expected = plain_tokens(kernels, [prompt], [SAMPLINGS["greedy"]], 10)[0]
    pair = Pair(kernels, "itself", max_tokens=24)
    pair.step([pair.start(0, prompt, SAMPLINGS["greedy"])])
    for _ in range(4):
        pair.step(rows=[0], num_draft=[2])
    assert pair.short == [(0, 0), (0, 0)]
    assert pair.tokens[0] == expected[: len(pair.tokens[0])]
    assert len(pair.tokens[0]) == 1 + 2 + 2 * 3


@pytest.mark.parametrize("kernels", KERNELS)
def test_rejection_draws_from_the_targets_distribution(kernels):
    """The token after a prompt, and the one after that, over many seeds: counts with and without drafts, by a chi-square test."""
    prompt, num_seeds = prompt_of(12), 160

    def counts(num_draft, **more):
        pair = Pair(kernels, "far", num_rows=4)
        firsts, seconds = Counter(), Counter()
        for seed in range(0, num_seeds, 4):
            pair.tokens.clear()
            sampling = [SamplingParams(temperature=1.0, top_k=4, seed=seed + row + 1000 * (not num_draft)) for row in range(4)]
            pair.step([pair.start(row, prompt, sampling[row], **more) for row in range(4)])
            pair.step(rows=range(4), num_draft=[num_draft] * 4 if num_draft else None)
            while any(len(pair.tokens[row]) < 3 for row in range(4)):
                pair.step(rows=[row for row in range(4) if len(pair.tokens[row]) < 3])
            for row in range(4):
                firsts[tuple(pair.tokens[row][:2])] += 1
                seconds[tuple(pair.tokens[row][:3])] += 1
        return firsts, seconds, pair

    plain = counts(0)
    drafted = counts(2, is_rejection=True)
    assert 0 < drafted[2].accepted < drafted[2].drafted
    for ours, theirs in zip(drafted[:2], plain[:2], strict=True):
        common = [token for token in ours | theirs if ours[token] + theirs[token] >= 10]
        chi_square = sum((ours[token] - theirs[token]) ** 2 / (ours[token] + theirs[token]) for token in common)
        assert chi_square < len(common) + 4 * (2 * len(common)) ** 0.5
