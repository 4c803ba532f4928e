"""Matches that end inside a block, through the whole engine: the tokens are those of a prompt that shares nothing."""

from __future__ import annotations

import random

import pytest
from tiny_models import make_model

import kvd
from kvd.executor.kernels.cpu import native

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store, pytest.mark.torch]

KINDS = {
    "fake": {"executor": "fake", "kv_memory": "1MiB"},
    "torch": {"kernels": "torch", "dtype": "float32", "kv_memory": "4MiB"},
    "native": {"kernels": "native", "kv_memory": "4MiB"},
    "native-int8": {"kernels": "native", "kv_dtype": "int8", "kv_memory": "4MiB"},
}
MOST_TURNS = 20
GREEDY = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model"), hidden_size=128, max_position_embeddings=512))


def opened(kind, model, **settings):
    if kind.startswith("native") and native.status().isa is None:
        pytest.skip(native.status().reason)
    return kvd.LLM("" if kind == "fake" else model, **{**KINDS[kind], **settings})


def prompts_of(seed, num_prompts, vocabulary=250):
    """Prompts that leave a stem at every length, also in the middle of other prompts' blocks."""
    draw = random.Random(seed)
    known = [[draw.randrange(2, vocabulary) for _ in range(70)]]
    while len(known) < num_prompts:
        stem = draw.choice(known)
        known.append(stem[: draw.randint(1, len(stem))] + [draw.randrange(2, vocabulary) for _ in range(draw.randint(1, 30))])
    return known


def alone(llm, prompt, number, **options):
    return llm.generate([prompt], **GREEDY, cache_salt=f"alone {number}", **options)[0]


@pytest.mark.parametrize(("kind", "chunk"), [("fake", 24), ("torch", 512), ("native", 24), ("native-int8", 512)])
def test_the_same_tokens_as_alone(kind, chunk, model):
    with opened(kind, model, max_tokens_per_step=chunk) as llm:
        prompts = prompts_of(1, 16)
        num_cached, said = [], []
        for number, prompt in enumerate(prompts):
            answer = llm.generate([prompt], **GREEDY)[0]
            said.append(alone(llm, prompt, number).token_ids)
            assert answer.token_ids == said[-1]
            assert answer.usage.cached_tokens < len(prompt)
            num_cached.append(answer.usage.cached_tokens)
        assert sum(count % 16 != 0 for count in num_cached) > 4
        again = llm.generate(prompts, **GREEDY, progress=False)  # in one batch, each with nearly all of it there
        for number, (prompt, answer) in enumerate(zip(prompts, again, strict=True)):
            assert answer.token_ids == said[number]
            assert answer.usage.cached_tokens >= max(num_cached[number], len(prompt) // 16 * 16 - 1)
        assert llm.client.stats()["cache"]["partial_hit_tokens"] > 30
        assert llm.client.status()["blocks"]["used"] == 0


@pytest.mark.parametrize("kind", ["fake", "native"])
def test_choices_beams_and_preemption_over_a_beginning(kind, model):
    """A pool so small that requests lose their blocks and come back."""
    size = {"kv_memory": "10KiB"} if kind == "fake" else {"kv_memory": "320KiB", "dtype": "float32", "max_model_len": 160}
    with opened(kind, model, **size) as llm:
        options = [{"n": 3, "seed": 3, "temperature": 0.7}, {"beam_width": 2}, {"n": 2, "seed": 4, "temperature": 0.9}]
        asked = [{**GREEDY, **each, "max_tokens": 40} for each in options]
        for turn in range(MOST_TURNS):  # until they have run beside each other
            stem = prompts_of(2 + turn, 1)[0][:41]
            llm.generate([[*stem, 5, 6, 7, 8, 9, 10, 11, 12]], **GREEDY)
            answers = llm.generate([[*stem, number] for number in range(20, 23)], asked, progress=False)
            for number, answer in enumerate(answers):
                reference = llm.generate([[*stem, 20 + number]], {**asked[number], "cache_salt": f"{turn}.{number}"})[0]
                assert [choice.token_ids for choice in answer.choices] == [choice.token_ids for choice in reference.choices]
                assert answer.usage.cached_tokens == 41
            if llm.client.stats()["scheduler"]["preemptions"]:
                break
        else:
            pytest.fail(f"nobody was preempted in {MOST_TURNS} turns: {llm.client.stats()['scheduler']}")
        assert llm.client.status()["blocks"]["used"] == 0


def test_what_was_restored_gives_its_beginning_too(tmp_path, model):
    prompt = prompts_of(3, 1)[0][:48]
    for is_first in (True, False):
        with opened("torch", model, state_dir=tmp_path / "state", write_policy="through") as llm:
            if is_first:
                llm.generate([[*prompt, 3]], **GREEDY)
                continue
            answer = llm.generate([[*prompt[:37], 3, 4]], **GREEDY)[0]
            assert (answer.usage.cached_tokens, answer.usage.restored_tokens) == (37, 37)
            assert answer.token_ids == alone(llm, [*prompt[:37], 3, 4], 0).token_ids


def test_a_few_common_tokens_are_computed(model):
    with opened("fake", model) as llm:
        llm.generate([[1, 2, 3, 4, *range(5, 40)]], **GREEDY)
        assert llm.generate([[1, 2, 3, 99, 99]], **GREEDY)[0].usage.cached_tokens == 0
        assert llm.generate([[1, 2, 3, 4, 99]], **GREEDY)[0].usage.cached_tokens == 4
