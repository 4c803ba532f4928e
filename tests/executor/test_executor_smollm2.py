"""SmolLM2 through the runner: chunked and batched greedy runs give the reference's tokens, restored bytes give the same bits."""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.model]

import torch  # noqa: E402

from kvd.executor.kv_pool import KvPool  # noqa: E402
from kvd.executor.models.inspect import inspect_model  # noqa: E402
from kvd.executor.models.spec import fit_length  # noqa: E402
from kvd.executor.models.weights.load import load_decoder  # noqa: E402
from kvd.executor.runner import TorchRunner  # noqa: E402
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

DATA = Path(__file__).parent.parent / "data"
SIZE = 16
GREEDY = SamplingParams(temperature=0.0)
TOLERATED_MARGIN = 1e-4
SAMPLE = ("prose-01", "ask-03", "code-02", "world-05", "digits-02", "odd-04", "long-02", "chat-01", "longchat-01")


def read_lines(name):
    return {entry["id"]: entry for entry in map(json.loads, filter(None, (DATA / name).read_text(encoding="utf-8").split("\n")))}


@pytest.fixture(scope="module")
def spec(smollm2):
    return fit_length(inspect_model(smollm2), 2048)[0]


@pytest.fixture(scope="module")
def decoder(smollm2, spec):
    return load_decoder(smollm2, spec, dtype=torch.float32, device="cpu")


def make_runner(decoder, spec, num_blocks, dtype=torch.float32):
    pool = KvPool(spec, num_blocks, SIZE, dtype, "cpu")
    return TorchRunner(decoder, spec, pool, max_rows=16, max_model_len=2048), pool


class Served:
    """A prompt on its way: which row, how far."""

    def __init__(self, row, prompt, block_ids):
        self.row, self.prompt, self.block_ids = row, prompt, block_ids
        self.done, self.tokens = 0, []


def serve(runner, prompts, num_tokens, *, budget, num_blocks, max_rows=16):
    """Greedy continuations of all prompts, chunked and batched under a token budget, in blocks at random places."""
    free_blocks, free_rows = random.Random(0).sample(range(num_blocks), num_blocks), list(range(max_rows))
    waiting, running, finished, released = deque(prompts.items()), {}, {}, []
    while waiting or running:
        left, started, continued = budget - len(running), [], ContinuedRows()
        for served in running.values():
            count = min(1 + left, len(served.prompt) - served.done) if served.done < len(served.prompt) else 1
            left -= count - 1
            continued.rows.append(served.row)
            continued.num_tokens.append(count)
            continued.block_offsets.append(0)
            served.done += count
        while waiting and free_rows and left > 0 and len(free_blocks) * SIZE >= len(waiting[0][1]) + num_tokens + SIZE:
            name, prompt = waiting.popleft()
            blocks = [free_blocks.pop() for _ in range(-(-(len(prompt) + num_tokens) // SIZE))]
            served = running[name] = Served(free_rows.pop(), prompt, blocks)
            served.done = min(left, len(prompt))
            left -= served.done
            started.append(StartedRow(served.row, pack_tokens(prompt), len(prompt), 0, served.done, tuple(blocks), GREEDY))
        output = runner.execute(SchedulerOutput(0, tuple(started), continued, tuple(released)))
        assert output.failed_rows == ()
        sampled, released = dict(zip(output.rows, output.token_ids, strict=True)), []
        for name, served in list(running.items()):
            served.tokens += [sampled[served.row]] if served.row in sampled else []
            if len(served.tokens) == num_tokens:
                finished[name] = served.tokens
                released.append(served.row)
                free_rows.append(served.row)
                free_blocks += served.block_ids
                del running[name]
    return finished


def divergences(runner, names, *, budget, num_blocks):
    """Where continuations part from the references: (prompt, index, margin there)."""
    prompts, references = read_lines("smollm2_prompts.jsonl"), read_lines("smollm2_reference.jsonl")
    served = serve(runner, {name: prompts[name]["token_ids"] for name in names}, 64, budget=budget, num_blocks=num_blocks)
    found = []
    for name in names:
        expected = references[name]
        pairs = enumerate(zip(served[name], expected["token_ids"], strict=True))
        at = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
        if at is not None:
            found.append((name, at, expected["margins"][at]))
    for name, at, margin in found:
        print(f"{name} parts at token {at}, margin {margin:.2e}")
    return found


def test_a_sample_of_every_kind_continues_as_the_reference(decoder, spec):
    runner, _ = make_runner(decoder, spec, 320)
    found = divergences(runner, SAMPLE, budget=192, num_blocks=320)
    assert all(margin < TOLERATED_MARGIN for _, _, margin in found)
    assert len(found) <= 1


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_prompt_continues_as_the_reference(decoder, spec):
    names = list(read_lines("smollm2_prompts.jsonl"))
    runner, _ = make_runner(decoder, spec, 1024)
    found = divergences(runner, names, budget=256, num_blocks=1024)
    assert all(margin < TOLERATED_MARGIN for _, _, margin in found)
    assert len(found) <= len(names) // 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_prefix_continues_with_the_same_bits(smollm2, spec, decoder, dtype):
    ours = decoder if dtype == torch.float32 else load_decoder(smollm2, spec, dtype=dtype, device="cpu")
    prompt = read_lines("smollm2_prompts.jsonl")["long-01"]["token_ids"]
    num_cached = (len(prompt) - 1) // SIZE * SIZE
    num_full, num_blocks = num_cached // SIZE, num_cached // SIZE + 3
    seen = []

    class Watched:
        def __init__(self, decoder):
            self.forward, self._decoder = decoder.forward, decoder

        def logits(self, hidden):
            seen.append(self._decoder.logits(hidden))
            return seen[-1].clone()

    def run(runner, table, num_computed):
        seen.clear()
        started = StartedRow(0, pack_tokens(prompt), len(prompt), num_computed, len(prompt) - num_computed, tuple(table), GREEDY)
        tokens = runner.execute(SchedulerOutput(0, (started,), ContinuedRows())).token_ids
        for _ in range(11):
            tokens += runner.execute(SchedulerOutput(0, (), ContinuedRows([0], [1], [0, 0]))).token_ids
        return tokens, list(seen)

    runner, pool = make_runner(Watched(ours), spec, num_blocks, dtype)
    run(runner, range(num_blocks), 0)
    saved = bytearray(num_full * pool.row_bytes)
    pool.read_blocks(range(num_full), memoryview(saved))
    hit = run(runner, range(num_blocks), num_cached)

    places = random.Random(4).sample(range(num_blocks + 20), num_blocks)
    other, other_pool = make_runner(Watched(ours), spec, num_blocks + 20, dtype)
    other_pool.write_blocks(places[:num_full], memoryview(bytes(saved)))
    restored = run(other, places, num_cached)
    assert restored[0] == hit[0]
    assert all(torch.equal(left, right) for left, right in zip(hit[1], restored[1], strict=True))
    again = bytearray(len(saved))
    other_pool.read_blocks(places[:num_full], memoryview(again))
    assert again == saved
