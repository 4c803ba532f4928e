"""Log-probabilities of prompts: those that the tokens would have as output, however the prompt is cut, on both kinds of kernels."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
from native_runner import native_decoder  # noqa: E402
from test_executor_runner import SPEC, VOCAB, decode, make_runner, prompt_of, start, step, tokens_of  # noqa: E402

from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.decoder import allocate_weights  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool  # noqa: E402
from kvd.executor.native_model import NativeModel  # noqa: E402
from kvd.executor.native_runner import NativeRunner  # noqa: E402
from kvd.executor.prompt_scores import PromptScores  # noqa: E402
from kvd.types import SamplingParams  # noqa: E402

BLOCKS = tuple(range(12))


def torch_runner():
    return make_runner()[0]


def native_runner():
    if native.status().isa is None:
        pytest.skip("no native kernels here")
    spec = replace(SPEC, head_dim=16, qkv_bias=False)
    weights = allocate_weights(spec, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    tensors = [weights.embedding, weights.final_norm]
    for layer in weights.layers:
        tensors += [tensor for name in type(layer).__slots__ if (tensor := getattr(layer, name)) is not None]
    for tensor in tensors:
        tensor.normal_(0, 0.3, generator=generator).add_(1.0 if tensor.dim() == 1 else 0.0)
    decoder = native_decoder(spec, weights, torch.float32, 200)
    pool = NativeKvPool(spec, 128, "float32")
    return NativeRunner(NativeModel(decoder, pool), pool, VOCAB, max_rows=8, max_model_len=200)


@pytest.fixture(params=[torch_runner, native_runner])
def runner(request):
    return request.param()


def scores(outputs, row=0):
    told = [each for output in outputs for each in output.prompt_logprobs if each.row == row]
    position = 1
    for each in told:
        assert each.first_position == position
        position += len(each.logprobs)
    return [entry for each in told for entry in each.logprobs]


def test_a_token_is_worth_in_the_prompt_what_it_is_worth_as_output(runner):
    prompt = prompt_of(9)
    first = runner.execute(step([start(prompt, BLOCKS, sampling=SamplingParams(temperature=0.0, num_logprobs=3))]))
    said, worth = tokens_of(first, 0), list(first.logprobs)
    for _ in range(12):
        output = runner.execute(step(rows=[0], num_tokens=[1]))
        said += tokens_of(output, 0)
        worth += output.logprobs
    scored = scores([runner.execute(step([start([*prompt, *said], BLOCKS, row=1, prompt_logprobs=3)], released=[0]))], row=1)
    assert [entry.token_id for entry in scored] == [*prompt, *said][1:]
    for entry, expected in zip(scored[8:], worth, strict=True):
        assert entry.token_id == expected.token_id
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in expected.top]
    assert all(len(entry.top) == 3 and entry.logprob <= entry.top[0][1] for entry in scored)


def test_chunks_slices_and_other_rows_change_nothing(runner, monkeypatch):
    prompt = prompt_of(30, seed=5)
    whole = scores([runner.execute(step([start(prompt, BLOCKS, prompt_logprobs=2)]))])
    assert len(whole) == 29
    monkeypatch.setattr("kvd.executor.prompt_scores._SLICE_VALUES", 7 * VOCAB)
    runner._scores = PromptScores(runner._batch, VOCAB)
    outputs = [
        runner.execute(
            step([start(prompt, BLOCKS, num_tokens=11, prompt_logprobs=2), start(prompt_of(6, seed=2), range(30, 40), row=1)], released=[0])
        )
    ]
    outputs += [runner.execute(step(rows=[0, 1], num_tokens=[count, 1])) for count in (3, 15)]
    assert outputs[-1].prompt_logprobs
    last = runner.execute(step(rows=[0], num_tokens=[1]))
    cut = scores([*outputs, last])
    assert len(tokens_of(last, 0)) == 1
    for one, other in zip(whole, cut, strict=True):
        assert (one.token_id, one.logprob) == (other.token_id, pytest.approx(other.logprob, abs=1e-4))
    assert [len(output.prompt_logprobs) for output in outputs] == [1, 1, 1]
    assert last.prompt_logprobs == (), "the last prompt token has nothing behind it that is of the prompt"
    assert runner.execute(step(rows=[0], num_tokens=[1])).prompt_logprobs == ()


def test_a_prompt_that_begins_computed_is_scored_from_there_on(runner):
    prompt = prompt_of(20, seed=3)
    whole = scores([runner.execute(step([start(prompt, BLOCKS, prompt_logprobs=0)]))])
    rest = runner.execute(step([start(prompt, BLOCKS, num_computed=8, prompt_logprobs=0)], released=[0])).prompt_logprobs[0]
    assert rest.first_position == 9
    assert [entry.logprob for entry in rest.logprobs] == pytest.approx([entry.logprob for entry in whole[8:]], abs=1e-4)


def test_several_choices_have_one_prompt_and_plain_rows_go_on_beside_it(runner):
    expected = [*tokens_of(runner.execute(step([start(prompt_of(7), BLOCKS)])), 0), *decode(runner, 3)]
    again = tokens_of(runner.execute(step([start(prompt_of(7), BLOCKS, row=2)], released=[0])), 2)
    sampling = SamplingParams(temperature=1.0, seed=4)
    output = runner.execute(
        step([start(prompt_of(10), range(40, 50), row=1, sampling=sampling, num_choices=3, prompt_logprobs=1)], [2], [1])
    )
    again += tokens_of(output, 2)
    assert sorted(choice for row, choice in zip(output.rows, output.choices, strict=True) if row == 1) == [0, 1, 2]
    assert len(scores([output], row=1)) == 9
    assert [*again, *decode(runner, 2, row=2)] == expected
