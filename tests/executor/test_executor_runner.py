"""The torch runner on a two-layer random decoder: schedules agree, restored bytes give the same bits, failures stay alone."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import random  # noqa: E402
from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
from tiny_spec import LLAMA  # noqa: E402

from kvd.executor.assemble import LateRunner  # noqa: E402
from kvd.executor.input_batch import BatchError  # noqa: E402
from kvd.executor.kv_pool import KvPool  # noqa: E402
from kvd.executor.models.decoder import Decoder, allocate_weights  # noqa: E402
from kvd.executor.models.spec import Architecture  # noqa: E402
from kvd.executor.runner import TorchRunner  # noqa: E402
from kvd.executor.worker import ExecutorThread  # noqa: E402
from kvd.step import BlockCopy, ContinuedRows, SchedulerOutput, StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

SIZE = 4
VOCAB = 300
GREEDY = SamplingParams(temperature=0.0)
SPEC = replace(
    LLAMA,
    architecture=Architecture.QWEN3,
    hidden_size=32,
    intermediate_size=48,
    head_dim=8,
    max_positions=256,
    rms_norm_eps=1e-6,
    windows=(0, 24),
    qkv_bias=True,
    qk_norm=True,
    tied_head=True,
)


def make_decoder(dtype=torch.float32):
    weights = allocate_weights(SPEC, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    tensors = [weights.embedding, weights.final_norm]
    for layer in weights.layers:
        tensors += [getattr(layer, name) for name in type(layer).__slots__]
    for tensor in tensors:
        tensor.normal_(0, 0.3, generator=generator).add_(1.0 if tensor.dim() == 1 else 0.0)
    if dtype == torch.float32:
        return Decoder(SPEC, weights)
    converted = allocate_weights(SPEC, dtype=dtype, device=torch.device("cpu"))
    targets = [converted.embedding, converted.final_norm]
    for layer in converted.layers:
        targets += [getattr(layer, name) for name in type(layer).__slots__]
    for source, target in zip(tensors, targets, strict=True):
        target.copy_(source)
    return Decoder(SPEC, converted)


class Watched:
    """A decoder that keeps the logits of every step."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.seen = []

    def forward(self, token_ids, positions, attend):
        return self.decoder.forward(token_ids, positions, attend)

    def logits(self, hidden):
        logits = self.decoder.logits(hidden)
        self.seen.append(logits.clone())
        return logits


def make_runner(dtype=torch.float32, num_blocks=128, decoder=None):
    pool = KvPool(SPEC, num_blocks, SIZE, dtype, "cpu")
    return TorchRunner(decoder or make_decoder(dtype), SPEC, pool, max_rows=8, max_model_len=200), pool


def step(started=(), rows=(), num_tokens=(), blocks=None, released=(), copies=()):
    offsets, ids = [0], []
    for appended in blocks if blocks is not None else [()] * len(rows):
        ids += appended
        offsets.append(len(ids))
    return SchedulerOutput(3, tuple(started), ContinuedRows(list(rows), list(num_tokens), offsets, ids), tuple(released), tuple(copies))


def start(tokens, block_ids, *, row=0, num_tokens=None, num_computed=0, sampling=GREEDY, num_prompt_tokens=None, **more):
    todo = len(tokens) - num_computed if num_tokens is None else num_tokens
    num_prompt_tokens = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return StartedRow(row, pack_tokens(tokens), num_prompt_tokens, num_computed, todo, tuple(block_ids), sampling, **more)


def tokens_of(output, row):
    return [token_id for found, token_id in zip(output.rows, output.token_ids, strict=True) if found == row]


def decode(runner, count, row=0):
    tokens = []
    for _ in range(count):
        tokens += tokens_of(runner.execute(step(rows=[row], num_tokens=[1])), row)
    return tokens


def prompt_of(length, seed=0):
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.fixture(scope="module")
def decoder():
    return make_decoder()


@pytest.fixture(scope="module")
def expected(decoder):
    """Greedy continuation by the plain decoder with dense attention over the whole sequence, no cache at all."""

    def dense(layer, q, k, v):
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
        window = SPEC.windows[layer]
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * SPEC.attention_scale
        return torch.einsum("hts,shd->thd", torch.softmax(scores.masked_fill(hidden, float("-inf")), -1), v)

    tokens = prompt_of(37)
    for _ in range(12):
        hidden = decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), dense)
        tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
    return tokens[37:]


def test_one_chunk_then_decodes_equal_the_decoder_without_a_cache(decoder, expected):
    runner, _ = make_runner(decoder=decoder)
    output = runner.execute(step([start(prompt_of(37), range(20))]))
    assert (output.step, output.rows, output.choices, output.logprobs, output.failed_rows) == (3, [0], [0], None, ())
    assert output.token_ids + decode(runner, 11) == expected


@pytest.mark.parametrize("seed", range(4))
def test_any_chunks_and_companions_give_the_same_tokens(decoder, expected, seed):
    rng = random.Random(seed)
    runner, _ = make_runner(decoder=decoder)
    free = rng.sample(range(128), 128)
    prompt, done, tokens, others = prompt_of(37), 0, [], []
    while len(tokens) < 12:
        chunk = min(rng.randint(1, 12), 37 - done) if done < 37 else 1
        held = -(-done // SIZE)
        blocks = [free.pop() for _ in range(-(-(done + chunk) // SIZE) - held)]
        released = [others.pop(0)] if len(others) > 4 else []
        others += released
        unused = [row for row in range(1, 8) if row not in others]
        begun = [
            start(prompt_of(rng.randint(1, 20), rng.random()), [free.pop() for _ in range(6)], row=row)
            for row in unused[:1]
            if len(free) > 30
        ]
        if done == 0:
            begun.append(start(prompt, blocks, num_tokens=chunk))
            rows, counts, appended = [], [], []
        else:
            rows, counts, appended = [0], [chunk], [blocks]
        output = runner.execute(step(begun, rows, counts, appended))
        others += [row.row for row in begun if row.row]
        done += chunk
        tokens += tokens_of(output, 0)
    assert tokens == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_blocks_give_the_same_bits_in_other_places(dtype):
    decoder = make_decoder(dtype)
    prompt = prompt_of(37)

    def continued_from(runner, table):
        """The same schedule over 32 positions that are there already."""
        output = runner.execute(step([start(prompt, table, num_computed=32, row=2)]))
        return output.token_ids + decode(runner, 8, row=2)

    first = Watched(decoder)
    runner, pool = make_runner(dtype, decoder=first)
    runner.execute(step([start(prompt, range(20))]))
    saved = bytearray(8 * pool.row_bytes)
    pool.read_blocks(range(8), memoryview(saved))
    first.seen.clear()
    tokens = continued_from(runner, [*range(8), *range(40, 52)])

    second = Watched(decoder)
    other, other_pool = make_runner(dtype, num_blocks=64, decoder=second)
    places = random.Random(1).sample(range(64), 20)
    other_pool.write_blocks(places[:8], memoryview(bytes(saved)))
    assert continued_from(other, places) == tokens
    assert len(first.seen) == len(second.seen) == 9
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first.seen, second.seen, strict=True))
    again = bytearray(len(saved))
    other_pool.read_blocks(places[:8], memoryview(again))
    assert again == saved


def test_a_follower_may_read_blocks_that_their_owner_computes_in_the_same_step(decoder, expected):
    runner, _ = make_runner(decoder=decoder)
    prompt = prompt_of(37)
    output = runner.execute(step([start(prompt, range(10), row=1), start(prompt, [*range(9), 30], num_computed=36, row=0)]))
    assert tokens_of(output, 0) == tokens_of(output, 1) == expected[:1]


def test_a_fork_shares_until_it_writes(decoder, expected):
    runner, pool = make_runner(decoder=decoder)
    prompt = prompt_of(37)
    output = runner.execute(step([start(prompt, range(10), sampling=SamplingParams(0.0, num_logprobs=1), num_choices=2)]))
    assert (output.rows, output.choices, output.token_ids) == ([0, 0], [0, 1], expected[:1] * 2)
    assert output.logprobs is not None
    assert output.logprobs[0] == output.logprobs[1]
    before = bytearray(pool.row_bytes)
    pool.read_blocks([9], memoryview(before))
    fork = start([*prompt, expected[0]], [*range(9), 20, 21], row=1, num_computed=37, num_prompt_tokens=37, choice=1)
    output = runner.execute(step([fork], [0], [1], copies=[BlockCopy(9, 20, 9, 1), BlockCopy(9, 22, 9, 0)]))
    assert output.token_ids == [expected[1]] * 2
    assert sorted(zip(output.rows, output.choices, strict=True)) == [(0, 0), (1, 1)]
    after = bytearray(pool.row_bytes)
    pool.read_blocks([9], memoryview(after))
    assert after == before
    output = runner.execute(step([], [0, 1], [1, 1], copies=[]))
    assert output.token_ids == [expected[2]] * 2


def test_a_preempted_row_goes_on_with_the_same_tokens(decoder):
    sampling = SamplingParams(temperature=1.5, top_p=0.95, seed=11, repetition_penalty=1.2, frequency_penalty=0.4)
    prompt = prompt_of(20)
    runner, _ = make_runner(decoder=decoder)
    whole = runner.execute(step([start(prompt, range(12), sampling=sampling)])).token_ids + decode(runner, 15)
    output = runner.execute(step([start([*prompt, *whole[:6]], range(40, 52), sampling=sampling, num_prompt_tokens=20)], released=[0]))
    assert output.token_ids + decode(runner, 9) == whole[6:]
    other = SamplingParams(temperature=1.5, top_p=0.95, seed=12, repetition_penalty=1.2, frequency_penalty=0.4)
    assert runner.execute(step([start(prompt, range(60, 72), sampling=other)])).token_ids + decode(runner, 15) != whole


class Broken(Watched):
    """Writes NaN wherever ``token_id`` is computed: into the hidden states, or into the keys and values of the first layer."""

    def __init__(self, decoder, token_id):
        super().__init__(decoder)
        self.token_id = token_id

    def forward(self, token_ids, positions, attend):
        bad = token_ids == self.token_id

        def poisoned(layer, q, k, v):
            if layer == 0:
                v = v.masked_fill(bad[:, None, None], float("nan"))
            return attend(layer, q, k, v)

        return self.decoder.forward(token_ids, positions, poisoned)


def test_a_row_with_nan_fails_alone_and_leaves_nothing_in_its_blocks(decoder, expected):
    runner, _ = make_runner(decoder=Broken(decoder, VOCAB - 1), num_blocks=10 + 12)
    clean = [token_id % (VOCAB - 1) for token_id in prompt_of(37)]
    assert clean == prompt_of(37)
    sick = start([*range(1, 20), VOCAB - 1, *range(1, 18)], range(10), row=1, num_tokens=25)
    output = runner.execute(step([sick, start(clean, range(10, 22))]))
    assert (output.rows, output.token_ids, output.failed_rows) == ([0], expected[:1], (1,))  # found in a middle chunk already
    output = runner.execute(step([], [0, 1], [1, 12]))
    assert (output.rows, output.token_ids, output.failed_rows) == ([0], [expected[1]], (1,))
    output = runner.execute(step([], [1, 0], [1, 1]))
    assert (output.rows, output.token_ids, output.failed_rows) == ([0], [expected[2]], (1,))
    used = [5, 6, 7, 8, 9, 4]  # from position 19 on, the sick row wrote NaN
    output = runner.execute(step([start(clean[:6], used, row=1)], [0], [1], released=[1]))
    assert sorted(output.rows) == [0, 1]
    assert output.failed_rows == ()
    tokens = tokens_of(output, 1)
    for _ in range(7):  # together with a longer row, so that the shorter one is padded
        tokens += tokens_of(runner.execute(step([], [0, 1], [1, 1])), 1)
    fresh, _ = make_runner(decoder=decoder)
    assert tokens == fresh.execute(step([start(clean[:6], range(10))])).token_ids + decode(fresh, 7)


def test_non_finite_logits_fail_their_row_alone(decoder):
    class Infinite(Watched):
        def logits(self, hidden):
            logits = super().logits(hidden)
            logits[0, 5] = float("inf")
            return logits

    runner, _ = make_runner(decoder=Infinite(decoder))
    output = runner.execute(step([start(prompt_of(5), range(3)), start(prompt_of(9), range(3, 7), row=1)]))
    assert (output.rows, output.failed_rows) == ([1], (0,))
    assert runner.execute(step([], [0], [1], blocks=[[50]])).failed_rows == (0,)


def test_warm_up_touches_no_block_and_no_row(decoder, expected):
    runner, pool = make_runner(decoder=decoder)
    runner.execute(step([start(prompt_of(37), range(20))]))
    before, after = bytearray(128 * pool.row_bytes), bytearray(128 * pool.row_bytes)
    pool.read_blocks(range(128), memoryview(before))
    runner.warm_up()
    pool.read_blocks(range(128), memoryview(after))
    assert before == after
    assert decode(runner, 5) == expected[1:6]


def test_an_empty_step_and_a_wrong_one(decoder):
    runner, _ = make_runner(decoder=decoder)
    assert runner.execute(step(released=[0, 3])).rows == []
    with pytest.raises(BatchError, match="row 2"):
        runner.execute(step(rows=[2], num_tokens=[1]))
    with pytest.raises(IndexError):
        runner.execute(step([start([VOCAB], [0])]))


def test_steps_in_flight_follow_each_other_without_the_scheduler_knowing_the_tokens(decoder, expected):
    runner, pool = make_runner(decoder=decoder)
    late = LateRunner(pool, b"f" * 32)
    late.attach(runner)
    executor = ExecutorThread(late)
    tickets = [executor.submit(step([start(prompt_of(37), range(20))]))]
    tickets += [executor.submit(step(rows=[0], num_tokens=[1])) for _ in range(8)]
    staging = bytearray(pool.row_bytes)
    copied = executor.copy_out("target", [0], memoryview(staging))
    assert [executor.collect(ticket).token_ids[0] for ticket in tickets] == expected[:9]
    assert copied.wait(60)
    assert copied.error is None
    direct = bytearray(pool.row_bytes)
    pool.read_blocks([0], memoryview(direct))
    assert staging == direct != bytes(pool.row_bytes)
    assert executor.close(timeout_s=60)
