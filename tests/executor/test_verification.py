"""Given drafts, right and wrong, against the rows' own samples; and what rejection sampling draws."""

from __future__ import annotations

import random

import pytest

pytestmark = pytest.mark.torch

from dataclasses import replace  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from native_runner import native_decoder  # noqa: E402
from tiny_spec import LLAMA  # noqa: E402

from kvd.executor import verification  # noqa: E402
from kvd.executor.drafts import keep_agreeing  # noqa: E402
from kvd.executor.input_batch import BatchError  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.kv_pool import KvPool  # noqa: E402
from kvd.executor.models.decoder import Decoder, allocate_weights  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool  # noqa: E402
from kvd.executor.native_model import NativeModel  # noqa: E402
from kvd.executor.native_runner import NativeRunner  # noqa: E402
from kvd.executor.runner import TorchRunner  # noqa: E402
from kvd.executor.sampling.columns import Draws  # noqa: E402
from kvd.executor.sampling.noise import gumbel, stream_keys  # noqa: E402
from kvd.executor.sampling.sampler import probabilities  # noqa: E402
from kvd.executor.verification import reject  # noqa: E402
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

SIZE, VOCAB, BLOCKS, POISON = 16, 120, 8, 77
KERNELS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(native.status().isa is None, reason="the native kernels are not there")),
]
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5, num_logprobs=2),
    SamplingParams(temperature=1.1, repetition_penalty=1.4, frequency_penalty=0.3, seed=7),
    SamplingParams(temperature=1.0, seed=2, logit_bias=((5, 4.0),), banned_token_ids=(7, 8), bad_words=((5, 5),)),
]
SPEC = replace(LLAMA, hidden_size=32, intermediate_size=48, vocab_size=VOCAB, max_positions=256, rms_norm_eps=1e-6, windows=(0, 24))


def make_runner(kernels):
    weights = allocate_weights(SPEC, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    for tensor in [weights.embedding, weights.final_norm, weights.head] + [
        tensor for layer in weights.layers for name in type(layer).__slots__ if (tensor := getattr(layer, name)) is not None
    ]:
        tensor.normal_(0, 0.3, generator=generator).add_(1.0 if tensor.dim() == 1 else 0.0)
    weights.embedding[POISON] = float("nan")
    limits = {"max_rows": 4, "max_model_len": 120}
    if kernels == "torch":
        pool = KvPool(SPEC, 4 * BLOCKS, SIZE, torch.float32, "cpu")
        return TorchRunner(Decoder(SPEC, weights), SPEC, pool, **limits)
    pool = NativeKvPool(SPEC, 4 * BLOCKS, "float32")
    return NativeRunner(NativeModel(native_decoder(SPEC, weights, torch.float32, 120), pool), pool, VOCAB, **limits)


class Rows:
    """Rows of one runner, driven as a scheduler does."""

    def __init__(self, kernels):
        self.runner = make_runner(kernels)
        self.tokens = {}
        self.logprobs = {}
        self.output = None

    def start(self, row, prompt, sampling, **more):
        table = tuple(range(row * BLOCKS, (row + 1) * BLOCKS))
        self.tokens[row] = list(prompt)
        self.logprobs[row] = []
        self.step([StartedRow(row, pack_tokens(prompt), len(prompt), 0, len(prompt), table, sampling, **more)], {})

    def step(self, started, drafts):
        """``drafts``: by row, what is drafted; None: nothing, and the row is not given its last token either."""
        given, offsets = [], [0]
        for row, drafted in drafts.items():
            given += [self.tokens[row][-1], *drafted] if drafted is not None else []
            offsets.append(len(given))
        counts = [len(drafted or ()) for drafted in drafts.values()]
        continued = ContinuedRows(
            list(drafts), [1 + count for count in counts], [0] * (len(drafts) + 1), [], counts if any(counts) else [], offsets, given
        )
        output = self.output = self.runner.execute(SchedulerOutput(1, tuple(started), continued))
        logprobs = output.logprobs or [None] * len(output.rows)
        for row, token_id, logprob in zip(output.rows, output.token_ids, logprobs, strict=True):
            self.tokens[row].append(token_id)
            self.logprobs[row].append(logprob)


def prompt_of(row):
    return random.Random(row).choices([token for token in range(1, VOCAB) if token != POISON], k=13 + 9 * row)


def plain(kernels, samplings, count):
    rows = Rows(kernels)
    for row, sampling in enumerate(samplings):
        rows.start(row, prompt_of(row), sampling)
    for _ in range(count):
        rows.step([], dict.fromkeys(range(len(samplings))))
    return rows


def begins_alike(ours, theirs):
    assert ours == theirs[: len(ours)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("first", [0, 2])
def test_drafts_change_no_token_however_right_they_are(kernels, first):
    samplings = SAMPLINGS[first : first + 3]
    expected = plain(kernels, samplings, 40)
    rows = Rows(kernels)
    for row, sampling in enumerate(samplings):
        rows.start(row, prompt_of(row), sampling)
    draw, accepted = random.Random(first), 0
    while min(len(rows.tokens[row]) - len(prompt_of(row)) for row in rows.tokens) < 30:
        drafts = {}
        for row, tokens in rows.tokens.items():
            right = expected.tokens[row][len(tokens) : len(tokens) + draw.randrange(5)]
            num_right = draw.randrange(len(right) + 1)
            drafts[row] = right[:num_right] + [draw.randrange(1, VOCAB) for _ in right[num_right:]] if draw.random() < 0.8 else None
            if len(tokens) > len(prompt_of(row)) + 30:
                del drafts[row]
        rows.step([], drafts)
        accepted += len(rows.output.rows) - len(drafts)
    assert accepted > 10
    for row, tokens in rows.tokens.items():
        begins_alike(tokens, expected.tokens[row])
        for ours, theirs in zip(rows.logprobs[row], expected.logprobs[row], strict=False):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_are_sampled_a_few_at_a_time_where_memory_is_bounded(kernels, monkeypatch):
    monkeypatch.setattr(verification, "_SLICE_VALUES", 7 * VOCAB)
    most = []
    finite_rows = verification.finite_rows
    monkeypatch.setattr(verification, "finite_rows", lambda values: most.append(len(values)) or finite_rows(values))
    for first in (0, 2):
        test_drafts_change_no_token_however_right_they_are(kernels, first)
    assert 1 < max(most) <= 7


@pytest.mark.parametrize("kernels", KERNELS)
def test_beside_a_row_that_begins_with_several_choices(kernels):
    expected = plain(kernels, SAMPLINGS[1:2], 8)
    rows = Rows(kernels)
    rows.start(0, prompt_of(0), SAMPLINGS[1])
    table = tuple(range(BLOCKS, 2 * BLOCKS))
    rows.tokens[1], rows.logprobs[1] = [], []
    begun = StartedRow(1, pack_tokens(prompt_of(1)), len(prompt_of(1)), 0, len(prompt_of(1)), table, SAMPLINGS[1], num_choices=3)
    size = len(prompt_of(0))
    rows.step([begun], {0: expected.tokens[0][size + 1 : size + 4]})
    begins_alike(rows.tokens[0], expected.tokens[0])
    assert len(rows.tokens[0]) == size + 5
    assert sorted(choice for row, choice in zip(rows.output.rows, rows.output.choices, strict=True) if row == 1) == [0, 1, 2]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("place", [0, 2])
def test_a_draft_that_is_not_finite_fails_nobody_and_leaves_nothing(kernels, place):
    expected = plain(kernels, SAMPLINGS[:2], 60)
    rows = Rows(kernels)
    for row in (0, 1):
        rows.start(row, prompt_of(row), SAMPLINGS[row])
    while len(rows.tokens[0]) < len(prompt_of(0)) + 20:
        size = len(rows.tokens[0])
        drafted = expected.tokens[0][size : size + 4]
        drafted[place:] = [POISON] * (4 - place)
        rows.step([], {0: drafted, 1: None})
        assert rows.output.failed_rows == ()
        rows.step([], {0: None, 1: None})
        assert rows.output.failed_rows == ()
    for row, tokens in rows.tokens.items():
        begins_alike(tokens, expected.tokens[row])


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_that_computes_what_is_not_finite_fails_though_others_draft(kernels):
    rows = Rows(kernels)
    rows.start(0, prompt_of(0), SAMPLINGS[0])
    rows.start(1, prompt_of(1), SAMPLINGS[0])
    rows.tokens[1][-1] = POISON
    rows.step([], {0: [1, 2], 1: []})
    assert rows.output.failed_rows == (1,)
    assert set(rows.output.rows) == {0}


def test_drafts_that_nobody_proposes_are_refused():
    runner = make_runner("torch")
    table = tuple(range(BLOCKS))
    runner.execute(SchedulerOutput(1, (StartedRow(0, pack_tokens([1, 2]), 2, 0, 2, table, SAMPLINGS[0]),), ContinuedRows()))
    with pytest.raises(BatchError, match="there is no draft model"):
        runner.execute(SchedulerOutput(2, (), ContinuedRows([0], [3], [0, 0], [], [2])))


def test_what_is_kept():
    starts = np.array([0, 3, 4, 7, 9])
    sampled = np.array([5, 6, 7, 1, 5, 9, 7, 2, 3])
    drafted = np.array([5, 6, -1, -1, 5, 6, -1, 2, -1])
    usable = np.array([True, True, True, True, True, True, True, False, True])
    verified = keep_agreeing(starts, sampled, drafted, usable)
    assert verified.num_kept.tolist() == [3, 1, 2, 0]
    assert verified.kept.tolist() == [0, 1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------ rejection


def draws_of(count, *, temperature=1.0, top_k=0, top_p=1.0):
    def column(value, dtype=np.float32):
        return np.full(count, value, dtype=dtype)

    return Draws(
        row=column(0, np.int64),
        choice=column(0, np.int64),
        position=column(9, np.int64),
        temperature=column(temperature),
        top_k=column(top_k, np.int64),
        top_p=column(top_p),
        min_p=column(0),
        repetition_penalty=column(1),
        presence_penalty=column(0),
        frequency_penalty=column(0),
        seed=np.arange(count, dtype=np.uint64),
        num_logprobs=column(-1, np.int64),
        penalised=column(0, bool),
    )


NUM_DRAWS = 20000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 0.2])


def check_distribution(drawn, probabilities):
    """Pearson's chi-square, against a bound that a right sampler passes but once in ten thousand times."""
    expected = probabilities.numpy() * NUM_DRAWS
    counts = np.bincount(drawn, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    degrees = some.sum() - 1
    chi_square = float(((counts - expected)[some] ** 2 / expected[some]).sum())
    assert chi_square < degrees + 4.3 * (2 * degrees) ** 0.5 + 4, (chi_square, degrees)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7, "temperature": 1.3}], ids=str)
@pytest.mark.parametrize("drafted", [0, 3, 6])
def test_a_token_that_nobody_drew_is_accepted_by_its_probability(options, drafted):
    draws = draws_of(NUM_DRAWS, **options)
    logits = LOGITS.repeat(NUM_DRAWS, 1)
    target = probabilities(logits[:1], draws_of(1, **options))[0]
    drawn = reject(logits, draws, np.zeros(NUM_DRAWS, dtype=np.int64), np.full(NUM_DRAWS, drafted), None)
    check_distribution(drawn, target)


def test_drawn_tokens_are_accepted_so_that_the_targets_distribution_results():
    draws = draws_of(NUM_DRAWS)
    proposed = torch.softmax(torch.tensor([0.0, 2.0, 0.0, 0.5, -1.0, -1.0, 1.0, 0.2]), dim=0)
    keys = stream_keys(draws.seed, draws.choice, draws.position)
    drafted = (proposed.log() + gumbel(keys, torch.arange(len(proposed)))).argmax(dim=-1).numpy()
    check_distribution(drafted, proposed)
    probs = proposed.repeat(NUM_DRAWS, 1)
    drawn = reject(LOGITS.repeat(NUM_DRAWS, 1), draws, np.zeros(NUM_DRAWS, dtype=np.int64), drafted, probs)
    check_distribution(drawn, torch.softmax(LOGITS, dim=0))
    overlap = float(torch.minimum(proposed, torch.softmax(LOGITS, dim=0)).sum())
    assert (drawn == drafted).mean() == pytest.approx(overlap, abs=0.02)


@pytest.mark.parametrize("has_probs", [False, True])
def test_what_is_certain_is_accepted_whatever_the_noise(monkeypatch, has_probs):
    """The noise's uniform may be rounded to 1."""
    monkeypatch.setattr(verification, "gumbel", lambda keys, ids: torch.full((len(keys), ids.shape[-1]), 23.0))
    logits = torch.full((2, 8), float("-inf"))
    logits[:, 5] = 0.0
    probs = torch.zeros(2, 8)
    probs[0, 5] = probs[1, 3] = 1.0
    drawn = reject(logits, draws_of(2), np.array([5, 5]), np.array([5, 3]), probs if has_probs else None)
    assert drawn.tolist() == [5, 5]


def test_what_was_not_drafted_stays_as_it_was_drawn():
    chosen = np.arange(8)
    assert reject(LOGITS.repeat(8, 1), draws_of(8), chosen, np.full(8, -1), None).tolist() == chosen.tolist()
