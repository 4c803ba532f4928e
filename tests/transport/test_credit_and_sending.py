"""Credit and backlogs: what may be under way, and what happens at the bound."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.transport.credit import StreamCredit
from kvd.transport.edge import Outgoing
from kvd.transport.sending import RECONNECT_GRACE_S, Attempt, Sender


@settings(max_examples=300, deadline=None)
@given(
    window=st.integers(1, 20),
    client_credit=st.integers(0, 30),
    steps=st.lists(st.tuples(st.sampled_from(["produce", "deliver", "drop", "allow"]), st.integers(1, 8)), max_size=60),
)
def test_credit_never_exceeds_window_or_promise_and_never_gets_stuck(window, client_credit, steps):
    credit = StreamCredit(window, client_credit)
    in_engine = credit.take_grant()
    promised, produced, waiting = client_credit, 0, 0
    for action, wanted in steps:
        amount = wanted
        if action == "produce":
            amount = min(wanted, in_engine)
            in_engine -= amount
            produced += amount
            waiting += amount
        elif action == "allow" and client_credit:
            credit.allow(amount)
            promised += amount
        elif waiting:
            amount = min(wanted, waiting)
            waiting -= amount
            if action == "deliver":
                credit.delivered(amount)
            else:
                credit.dropped(amount)
                promised += amount
        in_engine += credit.take_grant()
        assert in_engine + waiting == credit.num_outstanding <= window
        if client_credit:
            assert produced + in_engine <= promised
        if not waiting and not in_engine:
            assert client_credit
            assert produced == promised, "with nothing under way, only the client's promise can hold the stream up"


def test_an_unstated_credit_is_renewed_in_halves():
    credit = StreamCredit(8, 0)
    assert credit.take_grant() == 8
    credit.delivered(3)
    assert credit.take_grant() == 0
    credit.delivered(1)
    assert credit.take_grant() == 4


class Peers:
    """Sockets that take, block or are gone, by peer."""

    def __init__(self, max_backlog_bytes=10_000, max_total_backlog_bytes=1_000_000):
        self.state = {}
        self.taken = []
        self.sent = []
        self.dropped = 0
        self.gone = []
        self.overflown = []
        self.sender = Sender(
            attempt=self.attempt,
            on_sent=self.sent.append,
            on_dropped=self.drop,
            on_gone=self.gone.append,
            on_overflow=self.overflown.append,
            max_backlog_bytes=max_backlog_bytes,
            max_total_backlog_bytes=max_total_backlog_bytes,
        )

    def attempt(self, out):
        state = self.state.get(out.peer, Attempt.SENT)
        if state is Attempt.SENT:
            self.taken.append(out)
        return state

    def drop(self, num_messages):
        self.dropped += num_messages


def stream(peer, number, size=744):
    return Outgoing(peer, [b"%d" % number, bytes(size - 1)], b"id", 1)


def terminal(peer, number, size=744):
    return Outgoing(peer, [b"%d" % number, bytes(size - 1)])


def test_a_blocked_peer_keeps_its_order_and_holds_up_nobody():
    peers = Peers()
    peers.state[b"a"] = Attempt.FULL
    for number in range(3):
        peers.sender.send(stream(b"a", number), 0.0)
        peers.sender.send(stream(b"b", number), 0.0)
    assert [out.peer for out in peers.taken] == [b"b"] * 3
    assert peers.sender.has_backlog
    peers.state[b"a"] = Attempt.SENT
    peers.sender.send(stream(b"a", 3), 0.0)
    assert len(peers.taken) == 3, "a later message waits behind those before it"
    peers.sender.retry(0.1)
    assert [out.frames[0] for out in peers.taken[3:]] == [b"0", b"1", b"2", b"3"]
    assert not peers.sender.has_backlog
    assert peers.sent == peers.taken


def test_at_the_bound_stream_messages_give_way_and_terminal_ones_stay():
    peers = Peers(max_backlog_bytes=10_000)
    peers.state[b"a"] = Attempt.FULL
    peers.sender.send(terminal(b"a", 0), 0.0)
    for number in range(1, 12):
        peers.sender.send(stream(b"a", number), 0.0)
        assert peers.sender.backlog_bytes(b"a") <= 10_000
    assert peers.overflown == [b"a"]
    peers.sender.send(terminal(b"a", 99), 0.0)
    peers.state[b"a"] = Attempt.SENT
    peers.sender.retry(0.0)
    assert [out.frames[0] for out in peers.taken if not out.num_tokens] == [b"0", b"99"]


def test_even_terminal_messages_have_a_bound():
    peers = Peers(max_backlog_bytes=10_000)
    peers.state[b"a"] = Attempt.FULL
    for number in range(100):
        peers.sender.send(terminal(b"a", number), 0.0)
    assert peers.sender.backlog_bytes(b"a") <= 20_000
    peers.state[b"a"] = Attempt.SENT
    peers.sender.retry(0.0)
    assert [int(out.frames[0]) for out in peers.taken] == list(range(100 - peers.dropped))
    assert len(peers.taken) >= 19


def test_an_unreachable_peer_has_a_moment_to_come_back():
    peers = Peers()
    peers.state[b"a"] = Attempt.UNREACHABLE
    peers.sender.send(stream(b"a", 0), 10.0)
    peers.sender.retry(10.0 + RECONNECT_GRACE_S / 2)
    assert peers.gone == []
    peers.state[b"a"] = Attempt.SENT
    peers.sender.retry(10.0 + RECONNECT_GRACE_S * 0.9)
    assert len(peers.taken) == 1
    peers.state[b"a"] = Attempt.UNREACHABLE
    peers.sender.send(stream(b"a", 1), 20.0)
    peers.sender.retry(20.0 + RECONNECT_GRACE_S)
    assert peers.gone == [b"a"]
    assert peers.dropped == 1
    assert not peers.sender.has_backlog


def test_a_peer_that_blocks_is_not_gone():
    peers = Peers()
    peers.state[b"a"] = Attempt.FULL
    peers.sender.send(stream(b"a", 0), 0.0)
    for now in (1.0, 50.0, 100.0):
        peers.sender.retry(now)
    assert peers.gone == []


def test_after_the_bound_nothing_follows_that_would_leave_a_gap():
    peers = Peers(max_backlog_bytes=10_000)
    peers.state[b"a"] = Attempt.FULL
    for number in range(14):
        peers.sender.send(stream(b"a", number), 0.0)
    peers.sender.send(Outgoing(b"a", [b"new"], b"another request", 1), 0.0)
    peers.state[b"a"] = Attempt.SENT
    peers.sender.retry(0.0)
    assert [out.frames[0] for out in peers.taken] == [b"new"]
    assert peers.dropped == 14
    peers.sender.send(stream(b"a", 14), 0.0)
    assert len(peers.taken) == 2, "with the backlog gone all is as before"


def test_all_backlogs_together_have_a_bound_and_the_largest_gives_way():
    peers = Peers(max_backlog_bytes=10_000, max_total_backlog_bytes=15_000)
    for peer in (b"a", b"b", b"c"):
        peers.state[peer] = Attempt.FULL
    peers.sender.send(terminal(b"a", 0), 0.0)
    for number in range(1, 8):
        peers.sender.send(stream(b"a", number), 0.0)
    for number in range(6):
        peers.sender.send(stream(b"b", number), 0.0)
    assert (peers.overflown, peers.sender.total_bytes) == ([], 14_000)
    peers.sender.send(stream(b"c", 0), 0.0)
    assert peers.overflown == []
    peers.sender.send(stream(b"c", 1), 0.0)
    assert peers.overflown == [b"a"], "not the one that asked for more"
    assert peers.dropped == 7
    assert [peers.sender.backlog_bytes(peer) for peer in (b"a", b"b", b"c")] == [1000, 6000, 2000]
    peers.sender.send(stream(b"a", 8), 0.0)
    assert peers.sender.backlog_bytes(b"a") == 1000, "the rest of the stream would leave a gap"
    assert peers.sender.total_bytes == 9000
    peers.state.clear()
    peers.sender.retry(0.0)
    assert peers.sender.total_bytes == 0
    assert [int(out.frames[0]) for out in peers.taken] == [0, 0, 1, 2, 3, 4, 5, 0, 1]


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["stream", "terminal", "open", "block", "lose", "retry"]), st.integers(0, 4), st.integers(2, 3000)),
        max_size=120,
    )
)
def test_no_order_of_events_goes_beyond_the_bounds_or_miscounts(steps):
    peers = Peers(max_backlog_bytes=4000, max_total_backlog_bytes=9000)
    now = 0.0
    for action, number, size in steps:
        peer = b"%d" % number
        now += 0.5
        if action == "stream":
            peers.sender.send(stream(peer, 0, size), now)
        elif action == "terminal":
            peers.sender.send(terminal(peer, 0, size), now)
        elif action == "retry":
            peers.sender.retry(now)
        else:
            peers.state[peer] = {"open": Attempt.SENT, "block": Attempt.FULL, "lose": Attempt.UNREACHABLE}[action]
        waiting = [peers.sender.backlog_bytes(b"%d" % each) for each in range(5)]
        assert peers.sender.total_bytes == sum(waiting) <= 9000
        assert max(waiting) <= 8000
    peers.state.clear()
    peers.sender.retry(now)
    assert not peers.sender.has_backlog
    assert peers.sender.total_bytes == 0
