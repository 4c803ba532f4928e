"""Biases, lists, masks and log-probabilities in the queue of native steps: what the sampler says of the same rows, bit for bit, without waiting for it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import gc  # noqa: E402
import random  # noqa: E402
from concurrent.futures import ThreadPoolExecutor, wait  # noqa: E402
from dataclasses import replace  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from native_runner import native_decoder, native_runner  # noqa: E402
from tiny_spec import LLAMA  # noqa: E402

from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.decoder import allocate_weights  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool  # noqa: E402
from kvd.executor.native_model import NativeModel  # noqa: E402
from kvd.executor.native_runner import NativeRunner, PendingStep  # noqa: E402
from kvd.executor.sampling.masks import DrawMasks  # noqa: E402
from kvd.step import ContinuedRows, LateMasks, SchedulerOutput, StartedRow, TokenMasks  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

if native.status().isa is None:
    pytest.skip(native.status().reason, allow_module_level=True)

VOCAB = 301
NUM_WORDS = -(-VOCAB // 32)
SPEC = replace(LLAMA, vocab_size=VOCAB)
GREEDY = SamplingParams(temperature=0.0)
BIAS = ((7, 4.0), (300, -2.5), (33, 90.0))
WISHES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logit_bias=BIAS[:2], num_logprobs=3),
    SamplingParams(temperature=1.2, seed=3, logit_bias=BIAS[:2], num_logprobs=0),
    SamplingParams(temperature=0.0, allowed_token_ids=(1, 64, 65, 299, 300), num_logprobs=VOCAB),
    SamplingParams(temperature=0.7, seed=5, banned_token_ids=tuple(range(0, VOCAB, 2)), bad_words=((3,), (5,))),
    SamplingParams(temperature=2.0, seed=6, num_logprobs=20),
    SamplingParams(temperature=0.0, logit_bias=BIAS, allowed_token_ids=(33, 40), banned_token_ids=(33,), num_logprobs=1),
    SamplingParams(temperature=1.0, seed=8),
]
ISAS = native.module().available_isas()


@pytest.fixture(scope="module")
def decoder():
    weights = allocate_weights(SPEC, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    tensors = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        tensors += [tensor for name in type(layer).__slots__ if (tensor := getattr(layer, name)) is not None]
    for tensor in tensors:
        tensor.normal_(0, 1.0 if tensor is weights.embedding else 0.25, generator=generator).add_(1.0 if tensor.dim() == 1 else 0.0)
    return native_decoder(SPEC, weights, torch.float32, 120)


def queue_runner(decoder):
    pool = NativeKvPool(SPEC, 40, "float32")
    return NativeRunner(NativeModel(decoder, pool), pool, VOCAB, max_rows=8, max_model_len=100)


def start(row, sampling, **more):
    tokens = random.Random(row).choices(range(VOCAB), k=5 + row)
    return StartedRow(row, pack_tokens(tokens), len(tokens), 0, len(tokens), (3 * row, 3 * row + 1, 3 * row + 2), sampling, **more)


def words(allowed):
    return sum(1 << token for token in allowed).to_bytes(4 * NUM_WORDS, "little")


def random_masks(rows, seed):
    draw = random.Random(seed)
    some = [row for row in rows if draw.random() < 0.6]
    allowed = [draw.sample(range(VOCAB), draw.choice((1, 5, 200, VOCAB))) for _ in some]
    if not some:
        return None
    return TokenMasks(some, [1] * len(some), NUM_WORDS, b"".join(map(words, allowed)))


def step(started=(), rows=(), masks=None):
    return SchedulerOutput(3, tuple(started), ContinuedRows(list(rows), [1] * len(rows), [0] * (len(rows) + 1), []), masks=masks)


def said(output):
    logprobs = output.logprobs or [None] * len(output.rows)
    columns = sorted(zip(output.rows, output.choices, output.token_ids, logprobs, strict=True), key=lambda each: each[0])
    return columns, sorted(output.failed_rows), sorted(output.stuck_rows)


@pytest.mark.parametrize("seed", range(4))
def test_the_queue_draws_what_the_sampler_draws(decoder, seed):
    order = random.Random(seed).sample(range(8), 8)
    begun = [start(row, WISHES[row], min_tokens=3 * (row == 7), banned_token_ids=tuple(range(200)) if row == 7 else ()) for row in order]
    masked = [row for row in order if not WISHES[row].allowed_token_ids and not WISHES[row].banned_token_ids and row != 7]
    steps = [step(begun, masks=random_masks(masked, seed))]
    steps += [step(rows=order, masks=random_masks(masked, 10 * seed + nth)) for nth in range(1, 6)]
    ours = queue_runner(decoder)
    launched = [ours.launch(each) for each in steps]  # as if all were in flight
    assert all(isinstance(each, PendingStep) for each in launched)
    reference = native_runner(decoder, SPEC, 40, max_model_len=100)[0]
    assert [said(each.result()) for each in launched] == [said(reference.execute(each)) for each in steps]


def late(masks):
    return None if masks is None else LateMasks(masks.rows, masks.counts)


@pytest.mark.parametrize("kind", ["queue", "sampler"])
def test_masks_may_come_while_their_step_runs(decoder, kind):
    """In the order of the steps, from another thread, each when the step before it has ended; a step that the sampler finishes waits for its own as well."""
    order = [0, 1, 2, 5, 7]
    wish = {**dict(enumerate(WISHES)), 0: WISHES[0] if kind == "queue" else SamplingParams(top_k=5, seed=9)}
    masks = [random_masks(order, seed) for seed in range(5)]
    begun = [start(row, wish[row]) for row in order]
    reference = native_runner(decoder, SPEC, 40, max_model_len=100)[0]
    steps = [step(begun, masks=masks[0]), *(step(rows=order, masks=each) for each in masks[1:])]
    expected = [said(reference.execute(each)) for each in steps]
    ours = queue_runner(decoder)
    waiting = [replace(each, masks=None, late_masks=late(each.masks)) for each in steps]

    def tell():
        for each, told in zip(waiting, masks, strict=True):
            if told is not None:
                each.late_masks.tell(told)

    with ThreadPoolExecutor(1) as teller:
        if kind == "queue":
            launched = [ours.launch(each) for each in waiting]
            assert not any(each.done() for each, told in zip(launched, masks, strict=True) if told is not None)
            teller.submit(tell)
        else:
            teller.submit(tell)
            launched = [ours.launch(each) for each in waiting]
    heard = [said(each.result() if isinstance(each, PendingStep) else each) for each in launched]
    assert heard == expected


@pytest.mark.parametrize("drafting", [(1,), (0, 1)])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=4)])
def test_masks_of_drafts_may_come_while_their_step_runs(decoder, sampling, drafting):
    """One row drafts beside one that doesn't, or both do; what was drafted stays or is replaced by what its mask allows."""
    begun = step([start(0, sampling), start(1, sampling)])
    counts = [1 + 2 * (row in drafting) for row in (0, 1)]
    draw = random.Random(len(drafting))
    allowed = [
        [7 + row] if nth == 0 and row in drafting else draw.sample(range(VOCAB), 40)  # the first of a draft stays
        for row in (1, 0)
        for nth in range(counts[row])
    ]
    masks = TokenMasks([1, 0], counts[::-1], NUM_WORDS, b"".join(map(words, allowed)))

    def outcomes(runner, late_masks):
        first = runner.launch(begun)
        first = first.result() if isinstance(first, PendingStep) else first
        last = dict(zip(first.rows, first.token_ids, strict=True))
        given = [[last[row], 7 + row, 9] if row in drafting else [] for row in (0, 1)]
        offsets = [0, len(given[0]), len(given[0]) + len(given[1])]
        continued = ContinuedRows([0, 1], counts, [0, 0, 0], [], [count - 1 for count in counts], offsets, given[0] + given[1])
        second = runner.launch(SchedulerOutput(4, (), continued, masks=None if late_masks else masks, late_masks=late_masks))
        assert not isinstance(second, PendingStep)
        return said(first), said(second)

    expected = outcomes(queue_runner(decoder), None)
    assert all(sum(each[0] == row for each in expected[1][0]) >= 2 for row in drafting)
    late_masks = LateMasks(masks.rows, masks.counts)
    with ThreadPoolExecutor(1) as waiter:
        waiting = waiter.submit(outcomes, queue_runner(decoder), late_masks)
        assert not wait([waiting], timeout=0.05).done
        late_masks.tell(masks)
        assert waiting.result() == expected


def test_masks_that_never_come_keep_no_queue_alive(decoder):
    ours = queue_runner(decoder)
    pending = ours.launch(replace(step([start(0, GREEDY)]), late_masks=LateMasks([0], [1])))
    queued, pool = pending.queued, ours._pool  # the step computes in the pool's memory
    del ours, pending
    gc.collect()  # ends the queue's thread, if it hangs the test does
    assert queued.done()
    del pool


def test_masks_of_the_wrong_size_are_refused(decoder):
    ours = queue_runner(decoder)
    pending = ours.launch(step([start(0, GREEDY)], masks=TokenMasks([0], [1], 1, b"\xff" * 4)))
    with pytest.raises(ValueError, match="octets"):
        pending.result()


def test_a_row_for_which_nothing_is_left_fails_alone(decoder):
    ours = queue_runner(decoder)
    reference = native_runner(decoder, SPEC, 40, max_model_len=100)[0]
    begun = [
        start(0, SamplingParams(temperature=0.0, allowed_token_ids=(5,), num_logprobs=1)),
        start(1, SamplingParams(temperature=1.0, seed=1)),
    ]
    sick = TokenMasks([0], [1], NUM_WORDS, words([6]))
    steps = [step(begun, masks=sick), step(rows=[0, 1], masks=sick), step(rows=[1])]
    launched = [said(each.result()) for each in [ours.launch(each) for each in steps]]
    assert launched == [said(reference.execute(each)) for each in steps]
    assert [(failed, stuck) for _, failed, stuck in launched] == [([0], [0]), ([0], []), ([], [])]


def test_what_follows_the_output_is_left_to_the_sampler(decoder):
    ours = queue_runner(decoder)
    for sampling in (SamplingParams(bad_words=((3, 4),)), SamplingParams(top_k=3), SamplingParams(presence_penalty=1.0)):
        assert not isinstance(ours.launch(step([start(0, sampling)])), PendingStep)
    assert not isinstance(ours.launch(step([start(0, SamplingParams(), num_choices=2)])), PendingStep)


@pytest.fixture(params=ISAS)
def isa(request):
    module = native.module()
    best = module.isa()
    module.set_isa(request.param)
    yield request.param
    module.set_isa(best)


@pytest.mark.parametrize("size", [1, 17, 64, 1024, 5003])
def test_log_probabilities_are_those_of_float64(isa, size):
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(size)) * 8
    logits[2] = 0.5  # equals
    counts, places = np.array([0, 5, 20, size, -1]), np.array([0, size - 1, size // 2, 0, 0])
    scored = native.module().score(native.pool(2), logits.numpy(), counts, places)
    exact = torch.log_softmax(logits.double(), dim=-1)
    for row, (own, top) in enumerate(scored[:4]):
        assert own == pytest.approx(float(exact[row, places[row]]), rel=2e-7, abs=1e-6)
        ids = sorted(range(size), key=lambda token, row=row: (-float(logits[row, token]), token))[: counts[row]]
        assert [token for token, _ in top] == ids
        assert [value for _, value in top] == pytest.approx([float(exact[row, token]) for token in ids], rel=2e-7, abs=1e-6)
    alone = native.module().score(native.pool(2), logits[1:2].numpy(), counts[1:2], places[1:2])
    assert alone == scored[1:2]


@pytest.mark.parametrize("size", [1, 8, 23, 301])
def test_masks_leave_what_they_allow(isa, decoder, size):
    allowed = sorted(random.Random(size).sample(range(VOCAB), min(size, VOCAB)))
    runner = queue_runner(decoder)
    row = start(0, SamplingParams(temperature=0.0, num_logprobs=VOCAB))
    output = runner.execute(step([row], masks=TokenMasks([0], [1], NUM_WORDS, words(allowed))))
    (entry,) = output.logprobs
    by_id = dict(entry.top)
    assert len(by_id) == VOCAB
    assert output.token_ids == [max(allowed, key=lambda token: (by_id[token], -token))]


@pytest.mark.parametrize("size", [1, 8, 23, 301, 4096])
def test_the_sampler_forbids_by_the_same_kernel(isa, size):
    drawing = np.random.default_rng(size)
    octets = drawing.integers(0, 256, (3, -(-size // 8) + 3), dtype=np.uint8)
    octets[1, ::2], octets[2, 1::3] = 0, 255
    logits = torch.randn(5, size)
    forbidden = np.unpackbits(octets, axis=1, bitorder="little")[:, :size] == 0
    expected = logits.clone()
    expected[torch.tensor([4, 0, 2])] = expected[torch.tensor([4, 0, 2])].masked_fill(torch.from_numpy(forbidden), float("-inf"))
    DrawMasks(np.array([4, 0, 2]), octets).forbid(logits)
    assert torch.equal(logits, expected)
    with pytest.raises(IndexError, match="draw 5 of 5"):
        DrawMasks(np.array([4, 0, 5]), octets).forbid(logits)


def test_what_does_not_fit_is_refused():
    shaping = native.module().Shaping
    none, one = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    no_values = np.zeros(0, dtype=np.float32)
    with pytest.raises(ValueError, match="biases"):
        shaping(1, one, one, no_values, none, none, none, none, none, none)
    with pytest.raises(ValueError, match="draws of pairs"):
        shaping(1, none, none, no_values, one + 1, one, none, none, none, none)
    with pytest.raises(ValueError, match="masks"):
        shaping(1, none, none, no_values, none, none, none, none, one + 1, none)
    with pytest.raises(ValueError, match="log-probabilities"):
        shaping(2, none, none, no_values, none, none, none, none, none, one)
