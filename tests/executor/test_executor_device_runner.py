"""The GPU's runner and model on a CPU: Triton's interpreter computes, a rerun stands for a captured graph; steps, tokens and failures are those of the torch runner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_spec import LLAMA

from kvd.executor.assemble import LateRunner
from kvd.executor.gpu.decode_graphs import DecodeGraphs, Field, Rerun, StaticInputs, bucket_sizes
from kvd.executor.gpu.device_runner import DeviceRunner, PendingStep
from kvd.executor.gpu.transfer import download, upload
from kvd.executor.gpu.triton_model import TritonModel
from kvd.executor.kv_pool import KvPool
from kvd.executor.models.decoder import Decoder, allocate_weights
from kvd.executor.models.spec import Architecture
from kvd.executor.runner import TorchRunner
from kvd.executor.worker import ExecutorThread
from kvd.step import BlockCopy, ContinuedRows, SchedulerOutput, StartedRow
from kvd.types import SamplingParams, pack_tokens

pytestmark = [pytest.mark.torch, pytest.mark.triton]

SIZE = 16
VOCAB = 120
MAX_ROWS = 4
GREEDY = SamplingParams(temperature=0.0)
SPEC = replace(
    LLAMA,
    architecture=Architecture.QWEN3,
    hidden_size=32,
    intermediate_size=48,
    vocab_size=VOCAB,
    max_positions=256,
    rms_norm_eps=1e-6,
    windows=(0, 24),
    qkv_bias=True,
    qk_norm=True,
)
POISON = 77


def make_decoder():
    weights = allocate_weights(SPEC, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    tensors = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        tensors += [getattr(layer, name) for name in type(layer).__slots__]
    for tensor in tensors:
        tensor.normal_(0, 0.3, generator=generator).add_(1.0 if tensor.dim() == 1 else 0.0)
    weights.embedding[POISON] = float("nan")
    return Decoder(SPEC, weights)


def make_device_runner(*, graphs=True):
    pool = KvPool(SPEC, 64, SIZE, torch.float32, "cpu")
    limits = {"max_rows": MAX_ROWS, "max_model_len": 200}
    model = TritonModel(SPEC, make_decoder().weights, pool, graphs=Rerun() if graphs else None, **limits)
    model.capture()
    return DeviceRunner(model, pool, VOCAB, **limits)


def make_torch_runner():
    return TorchRunner(make_decoder(), SPEC, KvPool(SPEC, 64, SIZE, torch.float32, "cpu"), max_rows=MAX_ROWS, max_model_len=200)


def start(row, tokens, block_ids, *, num_tokens=None, num_computed=0, sampling=GREEDY, **more):
    todo = len(tokens) - num_computed if num_tokens is None else num_tokens
    return StartedRow(row, pack_tokens(tokens), len(tokens), num_computed, todo, tuple(block_ids), sampling, **more)


def step(number, started=(), going=(), released=(), copies=()):
    """``going``: (row, tokens, new blocks)."""
    offsets, ids = [0], []
    for _, _, blocks in going:
        ids += blocks
        offsets.append(len(ids))
    continued = ContinuedRows([row for row, _, _ in going], [count for _, count, _ in going], offsets, ids)
    return SchedulerOutput(number, tuple(started), continued, tuple(released), tuple(copies))


def script(sampling):
    """Prompts, a chunk, decodes, a fork with a copied tail, a release, a row that begins again: in all of it some rows sample with ``sampling``."""
    prompt = [7 * index % 70 for index in range(40)]
    forked = [*prompt[:20], 3]
    return [
        step(0, [start(0, prompt, [0, 1, 2], num_tokens=24, sampling=sampling), start(1, prompt[:5], [3])]),
        step(1, [start(2, prompt[:16], [4], sampling=sampling)], [(0, 16, []), (1, 1, [])]),
        step(2, going=[(0, 1, []), (1, 1, []), (2, 1, [5])]),
        step(3, [start(3, forked, [0, 7], num_computed=20, sampling=sampling)], [(0, 1, []), (2, 1, [])], [1], [BlockCopy(1, 7, 1, 3)]),
        step(4, [start(1, prompt[:30], [8, 9])], [(0, 1, []), (3, 1, []), (2, 1, [])]),
        step(5, going=[(3, 1, []), (2, 1, []), (0, 1, []), (1, 1, [])]),
        step(6, going=[(3, 1, []), (2, 1, []), (0, 1, []), (1, 1, [])]),
    ]


def columns(output):
    return sorted(zip(output.rows, output.choices, output.token_ids, strict=True)), output.failed_rows


def run_both(sampling):
    """The script on both runners, which must agree; how many steps of ours were launched to be taken later, and how many ran as graphs."""
    reference, ours = make_torch_runner(), make_device_runner()
    graphs = ours._triton._graphs
    used = []
    graphs.run = lambda *args, run=graphs.run: used.append(run(*args)) or used[-1]
    launched = [ours.launch(each) for each in script(sampling)]  # as if all were in flight
    pending = [each for each in launched if isinstance(each, PendingStep)]
    assert all(each.done() for each in pending)
    said = [columns(each.result() if isinstance(each, PendingStep) else each) for each in launched]
    assert said == [columns(reference.execute(each)) for each in script(sampling)]
    return len(pending), sum(output is not None for output in used)


def test_the_torch_runner_and_the_device_runner_say_the_same():
    assert run_both(SamplingParams(seed=5)) == (7, 4)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_p=0.8, seed=5, num_logprobs=2),
        pytest.param(SamplingParams(presence_penalty=0.5, seed=3), marks=pytest.mark.full),
        pytest.param(SamplingParams(min_p=0.1, top_k=7, seed=3), marks=pytest.mark.full),
    ],
)
def test_rows_that_want_more_are_sampled_with_the_hosts_help(sampling):
    assert run_both(sampling) == (1, 4)


@pytest.mark.full
def test_greedy_rows_too():
    assert run_both(GREEDY) == (7, 4)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.0, num_logprobs=0)])
def test_a_row_that_is_not_finite_fails_alone_until_it_starts_anew(sampling):
    runner = make_device_runner()
    bad = [POISON, 3, 4]
    first = runner.execute(step(0, [start(0, bad, [0], sampling=sampling), start(1, [5, 6, 7], [1])]))
    assert first.failed_rows == (0,)
    assert first.rows == [1]
    second = runner.execute(step(1, going=[(0, 1, []), (1, 1, [])]))
    assert (second.failed_rows, second.rows) == ((0,), [1])
    again = runner.execute(step(2, [start(0, [5, 6, 7], [2], sampling=sampling)], released=[0]))
    assert (again.failed_rows, again.rows) == ((), [0])
    assert again.token_ids == first.token_ids


def test_buckets_cover_every_number_of_rows():
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(6) == (1, 2, 4, 6)
    assert bucket_sizes(64) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    assert bucket_sizes(100) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100)


class Recorded:
    """Work that counts its runs and keeps what it saw."""

    def __init__(self):
        self.inputs = []

    def __call__(self, inputs):
        self.inputs.append({name: tensor.clone() for name, tensor in inputs.items()})
        return inputs["values"][:, None] * torch.ones(1, 2, dtype=torch.int32)


def make_graphs(work):
    def fields(num_rows):
        return {"values": Field((num_rows,), -1), "tables": Field((num_rows, 3), None), "few": Field((2,), 0)}

    return DecodeGraphs(work, fields, (2, 4), Rerun(), torch.device("cpu"))


def arrays(values, few=(1,)):
    values = np.array(values, dtype=np.int32)
    return {"values": values, "tables": np.full((len(values), 2), 9, dtype=np.int32), "few": np.array(few, dtype=np.int32)}


def test_a_step_takes_the_smallest_graph_that_holds_it_and_pads_the_rest():
    work = Recorded()
    graphs = make_graphs(work)
    assert graphs.run(1, arrays([5])) is None, "nothing is captured yet"
    graphs.capture()
    assert all((each["values"] == -1).all() for each in work.inputs), "a capture sees padding alone"
    assert graphs.run(2, arrays([5, 6])).tolist() == [[5, 5], [6, 6]]
    assert len(work.inputs[-1]["values"]) == 2
    assert graphs.run(3, arrays([1, 2, 3])).tolist() == [[1, 1], [2, 2], [3, 3]]
    assert work.inputs[-1]["values"].tolist() == [1, 2, 3, -1]
    assert work.inputs[-1]["tables"][:3, :2].eq(9).all()
    assert graphs.run(1, arrays([4], few=())).tolist() == [[4, 4]]
    assert work.inputs[-1]["values"].tolist() == [4, -1], "nothing of the step before is left"
    assert work.inputs[-1]["few"].tolist() == [0, 0]


def test_a_step_that_no_graph_holds_runs_without_one():
    graphs = make_graphs(Recorded())
    graphs.capture()
    assert graphs.run(5, arrays([1, 2, 3, 4, 5])) is None
    assert graphs.run(1, arrays([1], few=(1, 2, 3))) is None


def test_arrays_travel_together_and_keep_shape_and_dtype():
    sent = {
        "a": np.arange(5, dtype=np.int32),
        "keys": np.array([1 << 40, -7], dtype=np.int64),
        "none": np.zeros((0, 4), dtype=np.int32),
        "table": np.arange(6, dtype=np.int32).reshape(2, 3),
        "floats": np.array([0.5, 2.0], dtype=np.float32),
    }
    got = upload(sent, torch.device("cpu"))
    for name, array in sent.items():
        assert np.array_equal(got[name].numpy(), array)
        assert got[name].data_ptr() % 16 == 0 or not array.size
    back = download(got["keys"], got["floats"])
    got["keys"].zero_()
    assert back.fence.done()
    assert back.tensors[0].tolist() == [1 << 40, -7]


def test_it_serves_behind_the_executors_thread_once_warm():
    limits = {"max_rows": 2, "max_model_len": 20}
    pool = KvPool(SPEC, 16, SIZE, torch.float32, "cpu")
    runner = DeviceRunner(TritonModel(SPEC, make_decoder().weights, pool, graphs=Rerun(), **limits), pool, VOCAB, **limits)
    runner.warm_up()
    assert not pool.rows.any(), "warming up touches no block"
    late = LateRunner(pool, b"f" * 32)
    late.attach(runner)
    executor = ExecutorThread(late)
    steps = [step(0, [start(0, [1, 2, 3], [0])]), step(1, going=[(0, 1, [])]), step(2, going=[(0, 1, [])])]
    tickets = [executor.submit(each) for each in steps]
    reference = make_torch_runner()
    assert [columns(executor.collect(ticket)) for ticket in tickets] == [columns(reference.execute(each)) for each in steps]
    assert executor.close(60)


def test_warming_up_takes_the_ways_that_serve():
    """The device's own sampling, greedy and by noise, the host's help, and each graph once by its replay: not only the layers."""
    limits = {"max_rows": MAX_ROWS, "max_model_len": 20}
    pool = KvPool(SPEC, 16, SIZE, torch.float32, "cpu")
    maker = CountedGraphs()
    runner = DeviceRunner(TritonModel(SPEC, make_decoder().weights, pool, graphs=maker, **limits), pool, VOCAB, **limits)
    drawn, helped = [], []
    with pytest.MonkeyPatch.context() as patch:
        draw, finish = DeviceRunner._draw_on_device, DeviceRunner._finish_here
        patch.setattr(DeviceRunner, "_draw_on_device", lambda *args: drawn.append("keys" in args[-1]) or draw(*args))
        patch.setattr(DeviceRunner, "_finish_here", lambda *args: helped.append(1) or finish(*args))
        runner.warm_up()
    assert set(drawn) == {False, True}
    assert helped
    assert maker.num_replays == len(bucket_sizes(MAX_ROWS))


class CountedGraphs(Rerun):
    num_replays = 0

    def capture(self, work):
        output, replay = super().capture(work)

        def counted():
            self.num_replays += 1
            replay()

        return output, counted


def test_of_the_last_field_only_what_a_step_gives_is_sent():
    inputs = StaticInputs({"positions": Field((2,), -1), "tables": Field((1000, 2), None)}, torch.device("cpu"))
    assert inputs._words_of({}) <= 4
    given = {"positions": np.array([7], dtype=np.int32), "tables": np.array([[5], [6], [8]], dtype=np.int32)}
    assert inputs._words_of(given) <= 4 + 3 * 2
    inputs.fill(given)
    assert inputs.views["positions"].tolist() == [7, -1]
    assert inputs.views["tables"][:3, 0].tolist() == [5, 6, 8]
    assert not inputs.fits({"tables": np.zeros((1001, 1), dtype=np.int32)})


def test_a_graphs_step_costs_its_own_blocks_and_not_the_longest_possible_context():
    limits = {"max_rows": MAX_ROWS, "max_model_len": 200}
    model = TritonModel(SPEC, make_decoder().weights, KvPool(SPEC, 16, SIZE, torch.float32, "cpu"), graphs=Rerun(), **limits)
    assert next(reversed(model._graph_fields(2))) == "tables"
