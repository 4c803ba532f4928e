"""More choices sampled than told: the most likely ones come, at the end, best first."""

from __future__ import annotations

import pytest
from beam_world import World

from kvd.commands import RequestDone
from kvd.executor.fake import EOS_TOKEN_ID
from kvd.types import SamplingParams

PROMPT = b"a prompt of some length"


def told_one_by_one(num_choices, **options):
    """What each of so many choices says, with the log-probability of each token."""
    world = World()
    options["sampling"] = SamplingParams(temperature=1.0, seed=3, num_logprobs=2)
    request_id = world.submit(PROMPT, num_choices=num_choices, **options)
    world.finish()
    return [world.told[request_id][choice] for choice in range(num_choices)]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(("num_choices", "best_of"), [(1, 4), (2, 5), (3, 3)])
def test_the_most_likely_choices_are_told_best_first(num_choices, best_of, max_in_flight):
    options = {"max_tokens": 150, "stop_token_ids": (EOS_TOKEN_ID, *b"qx")}
    everything = told_one_by_one(best_of, **options)
    totals = [sum(entry.logprob for _, entry in choice) for choice in everything]
    assert len({len(choice) for choice in everything}) > 1
    world = World(max_in_flight=max_in_flight)
    request_id = world.submit(
        PROMPT, num_choices=num_choices, best_of=best_of, sampling=SamplingParams(temperature=1.0, seed=3, num_logprobs=2), **options
    )
    world.finish()
    if best_of == num_choices:
        assert [world.told[request_id][choice] for choice in range(num_choices)] == everything
        return
    ranked = sorted(range(best_of), key=lambda choice: -totals[choice])[:num_choices]
    assert [world.told[request_id][place] for place in range(num_choices)] == [everything[choice] for choice in ranked]
    ends = world.ends[request_id]
    assert [ends[place].cumulative_logprob for place in range(num_choices)] == pytest.approx([totals[choice] for choice in ranked])
    assert all(end.score is None for end in ends.values())
    assert all(end.reason == ("length" if len(world.told[request_id][place]) == 150 else "stop") for place, end in ends.items())


def test_they_need_no_credit_and_tell_no_log_probabilities_unasked():
    world = World()
    request_id = world.submit(PROMPT, num_choices=1, best_of=3, max_tokens=9, credit_tokens=0, sampling=SamplingParams(seed=1))
    while request_id not in world.terminal:
        assert not world.told[request_id]
        world.round()
    assert [entry for _, entry in world.told[request_id][0]] == [None] * 9
    assert isinstance(world.terminal[request_id], RequestDone)


def test_preempted_choices_rank_the_same():
    def ranked(preempt):
        world = World()
        request_id = world.submit(PROMPT, num_choices=2, best_of=4, max_tokens=30, sampling=SamplingParams(seed=1))
        for _ in range(10):
            world.round()
        if preempt:
            world.scheduler._roster.preempt(world.scheduler._requests[request_id])
        world.finish()
        return world.told[request_id], world.ends[request_id]

    assert ranked(preempt=True) == ranked(preempt=False)


def test_an_abort_tells_the_choices_that_were_asked_for():
    world = World()
    request_id = world.submit(PROMPT, num_choices=2, best_of=4, max_tokens=90, sampling=SamplingParams(seed=1), stop_token_ids=tuple(b"qx"))
    for _ in range(20):
        world.round()
    world.take(world.scheduler.finish_choice(request_id, 0))
    assert request_id not in world.terminal
    world.take(world.scheduler.abort(request_id))
    assert {choice: end.reason for choice, end in world.ends[request_id].items()} == {0: "aborted", 1: "aborted"}
    world.finish()
