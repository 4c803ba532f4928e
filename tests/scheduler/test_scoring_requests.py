"""Prompts whose tokens are scored: whole, in order and told once, whatever is cached and whoever takes their blocks meanwhile."""

from __future__ import annotations

import pytest
from beam_world import GREEDY, FakeModel, World
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.commands import PromptLogprobsOut, RequestDone, RequestFailed, TokensOut
from kvd.types import BeamSearch, SamplingParams


class ScoredWorld(World):
    """Keeps what is told of prompts, in the order of the tokens."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scores = {}

    def take(self, events):
        for event in events:
            if isinstance(event, PromptLogprobsOut):
                assert not self.told[event.request_id], "a prompt comes before its output"
                known = self.scores.setdefault(event.request_id, [])
                assert event.first_position == len(known) + 1, "without gaps, each once"
                known += event.logprobs
            elif isinstance(event, TokensOut) and event.request_id in self.scores:
                assert event.first_index >= 0
        super().take([event for event in events if not isinstance(event, PromptLogprobsOut)])


def check(world, request_id, prompt, model=None):
    model = model or FakeModel(world.cache.block_size_tokens)
    entries = world.scores[request_id]
    assert [entry.token_id for entry in entries] == list(prompt[1:])
    for place, entry in enumerate(entries, start=1):
        assert entry.logprob == pytest.approx(model.logprobs(tuple(prompt[:place]))[entry.token_id])


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_cached_prompt_is_computed_again_and_left_in_the_cache(max_in_flight):
    world = ScoredWorld(max_in_flight=max_in_flight, max_tokens_per_step=7)
    prompt = list(range(40, 63))
    ids = []
    for scored in (None, 1, 0, None):
        ids.append(world.submit(prompt, max_tokens=3, prompt_logprobs=scored))
        world.finish()
    cached = [world.terminal[request_id].usage.cached_tokens for request_id in ids]
    assert (cached[0], cached[1], cached[2]) == (0, 0, 0)
    assert cached[3] > 0
    for request_id in ids[1:3]:
        check(world, request_id, prompt)
    assert [len(entry.top) for entry in world.scores[ids[1]]] == [1] * 22
    assert len({tuple(world.said(request_id)) for request_id in ids}) == 1
    assert ids[0] not in world.scores


def test_a_prompt_that_lost_its_blocks_goes_on_behind_what_was_told():
    world = ScoredWorld(num_blocks=14, max_tokens_per_step=6)
    first = world.submit(range(65, 69), max_tokens=30)
    while len(world.told[first].get(0, ())) < 6:
        world.round()
    prompt = list(range(97, 97 + 40))
    scored = world.submit(prompt, max_tokens=4, prompt_logprobs=0)
    world.finish()
    check(world, scored, prompt)
    assert world.terminal[scored].usage.num_preemptions > 0
    begun = [started for step in world.steps for started in step.started if started.prompt_logprobs is not None]
    assert len(begun) > 1
    assert begun[0].num_computed == 0
    assert begun[-1].num_computed > 0, "what was told is not computed again if it is still cached"


def test_several_choices_and_beams_have_one_prompt():
    world = ScoredWorld(max_tokens_per_step=9)
    prompt = list(range(50, 75))
    ids = [
        world.submit(prompt, max_tokens=3, prompt_logprobs=0, num_choices=3, sampling=SamplingParams(seed=1)),
        world.submit(prompt, max_tokens=3, prompt_logprobs=0, num_choices=2, best_of=4, sampling=SamplingParams(seed=1)),
        world.submit(prompt, max_tokens=3, prompt_logprobs=0, num_choices=2, beam=BeamSearch(3)),
        world.submit(prompt[:1], max_tokens=3, prompt_logprobs=0),
    ]
    world.finish()
    for request_id in ids[:3]:
        assert isinstance(world.terminal[request_id], RequestDone)
        check(world, request_id, prompt)
    assert ids[3] not in world.scores


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(1, 24),
            st.integers(1, 8),
            st.sampled_from([None, 0, 1]),
            st.integers(1, 2),
            st.booleans(),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=6,
    ),
    num_blocks=st.integers(9, 16),
    budget=st.integers(3, 9),
    max_in_flight=st.integers(1, 2),
    poison=st.sampled_from([None, 70]),
)
def test_scores_are_whole_under_any_traffic(requests, num_blocks, budget, max_in_flight, poison):
    world = ScoredWorld(num_blocks=num_blocks, max_tokens_per_step=budget, max_in_flight=max_in_flight, max_running=4, poison=poison)
    model = FakeModel(world.cache.block_size_tokens)
    asked = {}
    for family, length, max_tokens, scored, choices, is_greedy, rounds in requests:
        prompt = [60 + family, *range(61, 60 + length)]
        sampling = GREEDY if is_greedy else SamplingParams(seed=family)
        request_id = world.submit(prompt, max_tokens=max_tokens, prompt_logprobs=scored, num_choices=choices, sampling=sampling)
        asked[request_id] = (prompt, scored)
        for _ in range(rounds):
            world.round()
    world.finish()
    for request_id, (prompt, scored) in asked.items():
        if isinstance(world.terminal[request_id], RequestFailed):
            continue
        if scored is None or len(prompt) == 1:
            assert request_id not in world.scores
        else:
            check(world, request_id, prompt, model)
