"""kvd demo: when an answer computed anew counts as the hit's own."""

from __future__ import annotations

import pytest
from kvd_client.results import Choice, Completion, Timings, TokenLogprob, Usage

# the demo's client needs zmq at its import
pytestmark = pytest.mark.socket


def completion(token_ids, tops=()):
    logprobs = (
        tuple(TokenLogprob(token_id=token_id, logprob=dict(top)[token_id], top=top) for token_id, top in zip(token_ids, tops, strict=True))
        if tops
        else ()
    )
    choice = Choice(index=0, text="", token_ids=tuple(token_ids), finish_reason="length", logprobs=logprobs)
    return Completion(request_id=b"", choices=(choice,), usage=Usage(), timings=Timings(), seed=0)


@pytest.mark.parametrize(
    ("hit", "top", "agrees"),
    [
        ((5, 6, 7), ((6, -0.7), (9, -0.8)), True),
        ((5, 9, 1), ((6, -0.7), (9, -0.8)), True),
        ((5, 9, 1), ((6, -0.2), (9, -1.9)), False),
        ((5, 8, 7), ((6, -0.7), (9, -0.8)), False),
    ],
    ids=["equal", "parted at a tie", "parted at no tie", "parted at a token that is not likely at all"],
)
def test_an_answer_computed_anew_may_part_from_the_hit_at_a_tie_alone(hit, top, agrees):
    from kvd.cli import demo_run

    sure = ((5, -0.1), (4, -3.0)), ((7, -0.1), (4, -3.0))
    assert demo_run._agreement(completion((5, 6, 7), (sure[0], top, sure[1])), completion(hit))[0] is agrees
