"""The native decoder: torch's numbers for every kind of model, and the same bits whatever shares the step."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import random  # noqa: E402
from dataclasses import replace  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from native_runner import native_decoder, native_runner  # noqa: E402
from tiny_spec import LLAMA  # noqa: E402

from kvd.executor.assemble import LateRunner  # noqa: E402
from kvd.executor.attention.backend import AttentionRows  # noqa: E402
from kvd.executor.input_batch import StepRows  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.kv_pool import KvPool  # noqa: E402
from kvd.executor.models.decoder import Decoder, allocate_weights  # noqa: E402
from kvd.executor.models.spec import Architecture, RopeSpec, RopeType  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool  # noqa: E402
from kvd.executor.native_model import NativeModel  # noqa: E402
from kvd.executor.native_runner import NativeRunner, PendingStep  # noqa: E402
from kvd.executor.runner import TorchRunner  # noqa: E402
from kvd.step import BlockCopy, ContinuedRows, SchedulerOutput, SharedRuns, StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

if native.status().isa is None:
    pytest.skip(native.status().reason, allow_module_level=True)

SIZE = 16
VOCAB = 300
GREEDY = SamplingParams(temperature=0.0)
PROMPT_TOKENS = 203
YARN = RopeSpec(type=RopeType.YARN, theta=1000.0, factor=4.0, attention_factor=1.1386, original_max_positions=64)
MODELS = {
    "llama": LLAMA,
    "llama-wide": replace(LLAMA, hidden_size=80, num_heads=3, num_kv_heads=1, head_dim=64, tied_head=True),
    "mistral-window": replace(LLAMA, architecture=Architecture.MISTRAL, windows=(100, 100), head_dim=48),
    "qwen2-yarn": replace(LLAMA, architecture=Architecture.QWEN2, qkv_bias=True, rope=YARN, num_kv_heads=4),
    "qwen3-window": replace(LLAMA, architecture=Architecture.QWEN3, qk_norm=True, tied_head=True, windows=(0, 70), head_dim=32),
}


FLOAT32 = [(name, torch.float32, "float32") for name in MODELS]
NARROW = [("llama-wide", torch.bfloat16, "bfloat16"), ("qwen3-window", torch.bfloat16, "int8"), ("llama", torch.float32, "int8")]


def make_weights(spec, seed=7):
    weights = allocate_weights(spec, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    tensors = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        tensors += [tensor for name in type(layer).__slots__ if (tensor := getattr(layer, name)) is not None]
    for tensor in tensors:
        tensor.normal_(0, 1.0 if tensor is weights.embedding else 0.25, generator=generator).add_(1.0 if tensor.dim() == 1 else 0.0)
    return weights


def prompt_of(length, seed=0):
    return random.Random(seed).choices(range(VOCAB), k=length)


def start(tokens, block_ids, *, row=0, num_tokens=None, num_computed=0, num_prompt_tokens=None, sampling=GREEDY, **more):
    todo = len(tokens) - num_computed if num_tokens is None else num_tokens
    prompt_tokens = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return StartedRow(row, pack_tokens(tokens), prompt_tokens, num_computed, todo, tuple(block_ids), sampling, **more)


def step(started=(), rows=(), num_tokens=(), **more):
    return SchedulerOutput(3, tuple(started), ContinuedRows(list(rows), list(num_tokens), [0] * (len(rows) + 1), []), **more)


def decode(runner, count, row=0):
    return [runner.execute(step(rows=[row], num_tokens=[1])).token_ids[0] for _ in range(count)]


class Tiny:
    """One model: its weights, its native decoder, and what a run of its prompt alone gives."""

    def __init__(self, name, dtype=torch.float32, kv_type="float32"):
        self.name = name
        self.spec = MODELS[name]
        self.weights = make_weights(self.spec)
        self.kv_type = kv_type
        self.decoder = native_decoder(self.spec, self.weights, dtype, 400)
        runner, self.pool, model = self.runner()
        self.tokens = runner.execute(step([start(prompt_of(PROMPT_TOKENS), range(20))])).token_ids + decode(runner, 11)
        self.logits = model.seen[0]

    def runner(self, num_blocks=128):
        return native_runner(self.decoder, self.spec, num_blocks, self.kv_type)


@pytest.fixture(scope="module", params=[*FLOAT32, *NARROW], ids=lambda param: "-".join(str(part) for part in param))
def tiny(request):
    return Tiny(*request.param)


def same_bits(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("tiny", FLOAT32, indirect=True)
def test_float32_is_that_of_torch(tiny):
    pool = KvPool(tiny.spec, 32, SIZE, torch.float32, "cpu")
    seen = []

    class Watched(Decoder):
        def logits(self, hidden):
            seen.append(super().logits(hidden))
            return seen[-1].clone()

    runner = TorchRunner(Watched(tiny.spec, tiny.weights), tiny.spec, pool, max_rows=4, max_model_len=400)
    expected = runner.execute(step([start(prompt_of(PROMPT_TOKENS), range(20))])).token_ids + decode(runner, 11)
    assert tiny.tokens == expected
    ours, theirs = torch.stack(tiny.logits), torch.cat(seen)
    torch.testing.assert_close(ours, theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("tiny", FLOAT32, indirect=True)
def test_bfloat16_is_as_near_to_float32_as_torchs(tiny):
    narrow = Tiny(tiny.name, torch.bfloat16, "bfloat16")
    converted = allocate_weights(tiny.spec, dtype=torch.bfloat16, device=torch.device("cpu"))
    for name in ("embedding", "final_norm", "head"):
        getattr(converted, name).copy_(getattr(tiny.weights, name))
    for target, source in zip(converted.layers, tiny.weights.layers, strict=True):
        for name in type(source).__slots__:
            if getattr(source, name) is not None:
                getattr(target, name).copy_(getattr(source, name))
    seen = []

    class Watched(Decoder):
        def logits(self, hidden):
            seen.append(super().logits(hidden))
            return seen[-1].clone()

    pool = KvPool(tiny.spec, 32, SIZE, torch.bfloat16, "cpu")
    runner = TorchRunner(Watched(tiny.spec, converted), tiny.spec, pool, max_rows=4, max_model_len=400)
    runner.execute(step([start(prompt_of(PROMPT_TOKENS), range(20))]))
    exact, torchs, ours = tiny.logits[0], seen[0][0], narrow.logits[0]
    assert (ours - exact).square().mean() < 2 * (torchs - exact).square().mean()


@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_companions_change_no_bit(tiny, seed):
    rng = random.Random(seed)
    runner, _, model = tiny.runner(256)
    free = rng.sample(range(256), 256)
    table, done, tokens, others = [free.pop() for _ in range(14)], 0, [], []
    prompt = prompt_of(PROMPT_TOKENS)
    while len(tokens) < 12:
        chunk = min(rng.choice((1, 3, 17, 64, 90)), PROMPT_TOKENS - done) if done < PROMPT_TOKENS else 1
        released = [others.pop(0)] if len(others) > 4 else []
        unused = [row for row in range(1, 8) if row not in others and row not in released]
        begun = []
        if unused and len(free) > 20:
            length = rng.randint(1, 120)
            begun.append(start(prompt_of(length, rng.random()), [free.pop() for _ in range(9)], row=unused[0]))
        rows = [row for row in others if rng.random() < 0.7]
        counts = [1] * len(rows)
        if done:
            rows.append(0)
            counts.append(chunk)
        else:
            begun.append(start(prompt, table, num_tokens=chunk))
        output = runner.execute(step(begun, rows, counts, released=tuple(released)))
        assert output.failed_rows == ()
        others += [row.row for row in begun if row.row]
        done += chunk
        tokens += [token_id for row, token_id in zip(output.rows, output.token_ids, strict=True) if row == 0]
    assert tokens == tiny.tokens
    assert same_bits(model.seen[0], tiny.logits)


def test_a_preempted_and_a_hit_row_go_on_with_the_same_bits(tiny):
    runner, _, model = tiny.runner()
    prompt = prompt_of(PROMPT_TOKENS)
    known = [*prompt, *tiny.tokens[:5]]
    runner.execute(step([start(known, range(40, 60), row=1, num_prompt_tokens=PROMPT_TOKENS)]))
    assert decode(runner, 6, row=1) == tiny.tokens[6:]
    assert same_bits(model.seen[1], tiny.logits[5:])
    shared = tuple(range(40, 40 + PROMPT_TOKENS // SIZE))
    runner.execute(step([start(prompt, [*shared, *range(70, 76)], row=2, num_computed=len(shared) * SIZE)]))
    assert decode(runner, 11, row=2) == tiny.tokens[1:]
    assert same_bits(model.seen[2], tiny.logits)


def test_a_fork_writes_its_own_copy(tiny):
    runner, _, model = tiny.runner()
    prompt = prompt_of(PROMPT_TOKENS)
    runner.execute(step([start(prompt, range(20))]))
    fork = start(
        [*prompt, tiny.tokens[0]], [*range(12), 30, 31], row=1, num_computed=PROMPT_TOKENS, num_prompt_tokens=PROMPT_TOKENS, choice=1
    )
    runner.execute(step([fork], [0], [1], copies=(BlockCopy(12, 30, 12, 1),)))
    for _ in range(10):
        runner.execute(step([], [0, 1], [1, 1]))
    assert same_bits(model.seen[0], tiny.logits)
    assert same_bits(model.seen[1], tiny.logits[1:])


def test_shared_runs_change_no_bit(tiny):
    """Six rows on one prefix of 192 positions, three of them on 64 more; the same steps with and without runs."""
    prefix, longer = prompt_of(192, 5), prompt_of(64, 6)

    def run(runs):
        runner, _, model = tiny.runner()
        runner.execute(step([start([*prefix, *longer, 1], range(17), row=7)]))
        rows = []
        for row in range(6):
            held = [*prefix, *longer] if row % 2 else prefix
            own = prompt_of(1 + 9 * row, row)
            table = [*range(len(held) // SIZE), *range(20 + 8 * row, 28 + 8 * row)]
            rows.append(start([*held, *own], table, row=row, num_computed=len(held)))
        runner.execute(step(rows, released=(7,), **({"shared_runs": runs} if runs else {})))
        for _ in range(3):
            runner.execute(step([], range(6), [1] * 6, **({"shared_runs": runs} if runs else {})))
        return model.seen

    plain = run(None)
    runs = SharedRuns(first_block=[0, 12], end_block=[12, 16], row_offsets=[0, 6, 9], rows=[0, 1, 2, 3, 4, 5, 1, 3, 5])
    shared = run(runs)
    assert all(same_bits(shared[row], plain[row]) for row in range(6))


def test_restored_blocks_give_the_same_bits(tiny):
    runner, pool, _ = tiny.runner()
    prompt = prompt_of(PROMPT_TOKENS)
    runner.execute(step([start(prompt, range(20))]))
    saved = bytearray(12 * pool.row_bytes)
    pool.read_blocks(range(12), memoryview(saved))
    other, other_pool, model = tiny.runner(64)
    places = random.Random(1).sample(range(64), 20)
    other_pool.write_blocks(places[:12], memoryview(bytes(saved)))
    other.execute(step([start(prompt, places, num_computed=12 * SIZE)]))
    assert decode(other, 11) == tiny.tokens[1:]
    assert same_bits(model.seen[0], tiny.logits)


def test_every_instruction_set_computes_the_same_model():
    module = native.module()
    best = module.isa()
    results = {}
    try:
        for isa in module.available_isas():
            module.set_isa(isa)
            results[isa] = Tiny("qwen3-window")
    finally:
        module.set_isa(best)
    for result in results.values():
        assert result.tokens == results[best].tokens
        torch.testing.assert_close(torch.stack(result.logits), torch.stack(results[best].logits), atol=2e-4, rtol=0)


def test_a_row_with_nan_fails_alone_and_leaves_nothing_in_its_blocks():
    spec = MODELS["llama"]
    weights = make_weights(spec)
    healthy = Tiny("llama")
    weights.embedding[VOCAB - 1] = float("nan")
    decoder = native_decoder(spec, weights, torch.float32, 400)
    runner, _, model = native_runner(decoder, spec, 40)
    prompt = prompt_of(PROMPT_TOKENS)
    clean = [token_id % (VOCAB - 1) for token_id in prompt]
    assert clean == prompt
    sick = start([*range(1, 20), VOCAB - 1, *range(1, 18)], range(20, 24), row=1, num_tokens=25)
    output = runner.execute(step([sick, start(prompt, range(20))]))
    assert (output.rows, output.token_ids, output.failed_rows) == ([0], healthy.tokens[:1], (1,))
    output = runner.execute(step([], [1, 0], [12, 1]))
    assert (output.rows, output.failed_rows) == ([0], (1,))
    output = runner.execute(step([start(prompt[:5], (21, 22), row=1)], [0], [1], released=(1,)))
    assert (sorted(output.rows), output.failed_rows) == ([0, 1], ())
    for _ in range(9):
        assert runner.execute(step([], [0, 1], [1, 1])).failed_rows == ()
    assert same_bits(model.seen[0], healthy.logits)


def test_what_does_not_exist_is_refused_before_anything_is_written():
    tiny = Tiny("llama")
    runner, pool, _ = tiny.runner(8)
    before, after = bytearray(8 * pool.row_bytes), bytearray(8 * pool.row_bytes)
    pool.read_blocks(range(8), memoryview(before))
    with pytest.raises(IndexError, match="token id 300 of 300"):
        runner.execute(step([start([1, VOCAB], [0])]))
    with pytest.raises(IndexError, match="block id 8 of 8"):
        runner.execute(step([start([1] * 32, [0, 8], row=1)]))
    pool.read_blocks(range(8), memoryview(after))
    assert before == after


CONTRADICTIONS = {
    "a row without tokens": ({"starts": [0, 3, 3]}, IndexError, "at least one token"),
    "rows that overlap": ({"starts": [0, 4, 3]}, IndexError, "at least one token"),
    "less than nothing computed": ({"num_computed": [64, -1]}, IndexError, "computed positions -1"),
    "a run that is not computed": ({"run_end": [80]}, IndexError, "end of a run 80"),
    "a run of no row": ({"run_rows": [0, 2]}, IndexError, "row of a run 2 of 2"),
    "a run before the first position": ({"run_start": [-64]}, IndexError, "before the first position"),
    "a run beyond its rows": ({"run_offsets": [0, 3]}, ValueError, "rows of runs"),
    "runs out of order": ({"run_start": [0, 0], "run_end": [64, 64], "run_offsets": [0, 5, 2]}, IndexError, "out of order"),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_step_that_contradicts_itself_is_refused(what):
    columns, error, message = CONTRADICTIONS[what]
    tiny = Tiny("llama")
    _, _, model = tiny.runner(8)
    rows = AttentionRows(
        num_tokens=np.array([1, 2]),
        num_computed=np.array([64, 64]),
        starts=np.array([0, 1, 3]),
        positions=np.array([64, 64, 65]),
        token_rows=np.array([0, 1, 1]),
        block_tables=np.array([[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]], dtype=np.int32),
        run_start=np.array([0]),
        run_end=np.array([64]),
        run_offsets=np.array([0, 2]),
        run_rows=np.array([0, 1]),
    )
    step_rows = StepRows(np.arange(2), rows, np.array([1, 2, 3]), np.ones(2, dtype=bool), np.zeros(0, dtype=np.int64))
    assert model.model.forward(step_rows).finite().all()
    wrong = replace(rows, **{name: np.array(values) for name, values in columns.items()})
    with pytest.raises(error, match=message):
        model.model.forward(replace(step_rows, attention=wrong))


def test_the_warm_up_is_long_enough_for_products_that_are_divided_by_rows():
    assert max(NativeModel.warm_up_prompts) > native.module().MANY_ROWS


def test_warm_up_touches_no_block_and_no_row(tiny):
    runner, pool, model = tiny.runner()
    runner.execute(step([start(prompt_of(PROMPT_TOKENS), range(20))]))
    before, after = bytearray(128 * pool.row_bytes), bytearray(128 * pool.row_bytes)
    pool.read_blocks(range(128), memoryview(before))
    runner.warm_up()
    pool.read_blocks(range(128), memoryview(after))
    assert before == after
    assert decode(runner, 11) == tiny.tokens[1:]
    assert same_bits(model.seen[0], tiny.logits)


def test_more_draws_than_tokens_and_mixed_sampling():
    tiny = Tiny("llama")
    runner, _, _ = tiny.runner()
    prompt = prompt_of(PROMPT_TOKENS)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3, num_logprobs=2)
    first = StartedRow(0, pack_tokens(prompt), len(prompt), 0, len(prompt), tuple(range(20)), sampled, num_choices=3)
    second = start(prompt, range(20, 40), row=1)
    output = runner.execute(step([first, second]))
    assert sorted(zip(output.rows, output.choices, strict=True)) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert output.logprobs is not None
    assert output.token_ids[output.rows.index(1)] == tiny.tokens[0]


# ---- steps in the queue ------------------------------------------------------------------------------------------------------------------


def queue_runner(tiny, num_blocks=128, decoder=None):
    pool = NativeKvPool(tiny.spec, num_blocks, tiny.kv_type)
    return NativeRunner(NativeModel(decoder or tiny.decoder, pool), pool, VOCAB, max_rows=8, max_model_len=400), pool


def script(sampling):
    """A chunk, decodes that enter new blocks, a fork with a copied tail, a release and another beginning in its row; some rows sample with ``sampling``."""
    prompt = prompt_of(40)
    return [
        step([start(prompt, [0, 1, 2], num_tokens=24, sampling=sampling), start(prompt[:5], [3], row=1)]),
        step([start(prompt[:16], [4, 5], row=2, sampling=sampling)], [0, 1], [16, 1]),
        step([], [0, 1, 2], [1, 1, 1]),
        step([start([*prompt[:20], 3], [0, 7], row=3, num_computed=20)], [0, 2], [1, 1], released=(1,), copies=(BlockCopy(1, 7, 1, 3),)),
        step([start(prompt[:30], [8, 9, 10], row=1)], [0, 3, 2], [1, 1, 1]),
        *(step([], [3, 2, 0, 1], [1, 1, 1, 1]) for _ in range(4)),
    ]


def columns(output):
    return sorted(zip(output.rows, output.choices, output.token_ids, strict=True)), output.failed_rows


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=5), SamplingParams(top_p=0.8, presence_penalty=0.5, seed=3)])
def test_steps_in_the_queue_say_what_they_say_one_by_one(tiny, sampling):
    reference, reference_pool, _ = tiny.runner()
    ours, pool = queue_runner(tiny)
    launched = [ours.launch(each) for each in script(sampling)]  # as if all were in flight
    assert sum(isinstance(each, PendingStep) for each in launched) == (
        1 if sampling.top_p < 1 else 9
    )  # the first: nobody samples beside the greedy row
    said = [columns(each.result() if isinstance(each, PendingStep) else each) for each in reversed(launched)]
    assert said[::-1] == [columns(reference.execute(each)) for each in script(sampling)]
    written = [bytearray(11 * pool.row_bytes) for _ in range(2)]
    for each, memory in zip((pool, reference_pool), written, strict=True):
        each.read_blocks(range(11), memoryview(memory))
    assert written[0] == written[1]


def test_rows_go_to_and_fro_between_the_queue_and_the_sampler(tiny):
    """A row whose last token only the queue knows takes part in a step that is sampled outside of it, and goes on in the queue."""
    plain, other = start(prompt_of(40), [0, 1, 2]), start(prompt_of(9), [3], row=1, sampling=SamplingParams(top_p=0.8, seed=3))
    steps = [
        step([plain]),
        step([], [0], [1]),
        step([other], [0], [1]),
        step([], [0, 1], [1, 1]),
        step([], [0], [1], released=(1,)),
        step([], [0], [1]),
    ]
    reference, _, _ = tiny.runner()
    ours, _ = queue_runner(tiny)
    launched = [ours.launch(each) for each in steps]
    assert [isinstance(each, PendingStep) for each in launched] == [True, True, False, False, True, True]
    said = [columns(each.result() if isinstance(each, PendingStep) else each) for each in launched]
    assert said == [columns(reference.execute(each)) for each in steps]


@pytest.mark.parametrize("where", ["hidden", "logits"])
def test_a_row_that_fails_in_the_queue_fails_in_each_step_until_it_begins_again(where):
    healthy = Tiny("llama")
    weights = make_weights(healthy.spec)
    (weights.embedding if where == "hidden" else weights.head)[VOCAB - 1] = float("nan")
    decoder = native_decoder(healthy.spec, weights, torch.float32, 400)
    ours, _ = queue_runner(healthy, 40, decoder)
    prompt = prompt_of(PROMPT_TOKENS)
    sick = start([*range(1, 20), VOCAB - 1], [20, 21, 22], row=1)
    steps = [step([sick, start(prompt, range(16))]), step([], [1, 0], [1, 1]), step([], [1, 0], [1, 1])]
    steps += [step([start(prompt[:5], [23], row=1)], [0], [1], released=(1,)), step([], [0, 1], [1, 1])]
    said = [each.result() for each in [ours.launch(each) for each in steps]]
    failed = [(1,), (1,), (1,), (), ()] if where == "hidden" else [(0, 1)] * 3 + [(0, 1)] * 2  # a NaN in the head is in every row's logits
    assert [tuple(sorted(each.failed_rows)) for each in said] == failed
    if where == "hidden":
        assert [dict(zip(each.rows, each.token_ids, strict=True))[0] for each in said] == healthy.tokens[:5]
        assert [sorted(each.rows) for each in said] == [[0], [0], [0], [0, 1], [0, 1]]


def test_what_the_sampler_finds_out_is_known_to_the_queue():
    tiny = Tiny("llama")
    weights = make_weights(tiny.spec)
    weights.head[VOCAB - 1] = float("nan")
    ours, _ = queue_runner(tiny, 40, native_decoder(tiny.spec, weights, torch.float32, 400))
    told = []
    ours._queue = Told(ours._queue, told)
    assert ours.execute(step([start(prompt_of(9), [0], sampling=SamplingParams(top_p=0.5))])).failed_rows == (0,)
    assert told == [([0], [True])]
    ours, _ = queue_runner(tiny, 40)
    ours.execute(step([start(prompt_of(9), [0]), start(prompt_of(9), [1], row=1)]))
    ours._queue.set_failed(np.array([1, 0]), np.array([True, False]))
    output = ours.execute(step([], [0, 1], [1, 1]))
    assert (output.rows, output.failed_rows) == ([0], (1,))


class Told:
    """A queue that notes what it is told about failures."""

    def __init__(self, queue, told):
        self.launch, self.wait = queue.launch, queue.wait
        self.set_failed = lambda rows, failed: (told.append((rows.tolist(), failed.tolist())), queue.set_failed(rows, failed))


def test_after_a_step_that_went_wrong_nothing_runs():
    tiny = Tiny("llama")
    ours, pool = queue_runner(tiny, 8)
    before, after = bytearray(8 * pool.row_bytes), bytearray(8 * pool.row_bytes)
    pool.read_blocks(range(8), memoryview(before))
    wrong, behind = ours.launch(step([start([1, VOCAB], [0])])), ours.launch(step([start([1, 2], [1], row=1)]))
    for each in (behind, wrong):
        with pytest.raises(IndexError, match="token id 300 of 300"):
            each.result()
        assert each.done()
    pool.read_blocks(range(8), memoryview(after))
    assert before == after
    with pytest.raises(IndexError, match="block 8 of 8"):
        ours.launch(step([start([1, 2], [1, 2])], copies=(BlockCopy(8, 2, 1, 0),)))


def test_a_block_that_a_row_has_lost_is_written_after_the_steps_under_way(tiny):
    ours, pool = queue_runner(tiny)
    late = LateRunner(pool, bytes(32))
    late.attach(ours)
    content = random.Random(3).randbytes(3 * pool.row_bytes)
    flights = [late.execute(step([start(prompt_of(PROMPT_TOKENS), range(20))])), late.execute(step([], [0], [1]))]
    late.write_blocks("target", [3, 0, 12], memoryview(content))
    assert all(each.done() for each in flights)
    kept = bytearray(len(content))
    late.read_blocks("target", [3, 0, 12], memoryview(kept))
    assert kept == content
