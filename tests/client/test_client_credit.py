"""The client's credit: granted to streams that live, returned as it is read, and never too little for a reader that keeps up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvd_client.calls import CreditWindow
from kvd_client.protocol.messages import Credit
from kvd_client.requests import generate_message
from session_world import Bench, finished


def test_credit_is_granted_for_live_streams_only() -> None:
    bench = Bench()
    bench.connect()
    call, _ = bench.generate(stream=True, window_tokens=8)
    bench.sent()
    bench.session.grant(call, 5)
    assert bench.sent() == [Credit(request_id=call.key, num_tokens=5)]
    bench.receive(finished(call.key, 0))
    bench.session.grant(call, 5)
    assert bench.sent() == []


@given(st.integers(1, 64), st.lists(st.integers(0, 9), max_size=60))
def test_a_window_returns_every_token_and_never_starves_a_reader_that_keeps_up(window: int, reads: list[int]) -> None:
    credit = CreditWindow(window)
    outstanding = 0
    for num_tokens in reads:
        outstanding += num_tokens
        outstanding -= credit.read(num_tokens)
        assert 0 <= outstanding < max(1, window // 2)


def test_a_window_holds_two_steps_of_all_choices() -> None:
    assert generate_message("text", stream=True, options={"n": 4, "window_tokens": 1}).credit == 8
