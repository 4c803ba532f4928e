"""The channels between edge and engine."""

from __future__ import annotations

import threading

from kvd.commands import Abort, Drain, Grant, Query, RecipeDurable, Stopped
from kvd.transport.inproc import InprocInbox, InprocOutbox


def test_new_work_is_bounded_and_what_concerns_accepted_work_is_not():
    inbox = InprocInbox(2)
    assert inbox.put(Query(b"1", "status"))
    assert inbox.put(Query(b"2", "status"))
    assert not inbox.put(Query(b"3", "status"))
    assert inbox.put(Abort(b"r"))
    assert inbox.put(Grant(b"r", 1))
    inbox.put_internal(RecipeDurable(b"4"))
    assert inbox.drain() == [Query(b"1", "status"), Query(b"2", "status"), Abort(b"r"), Grant(b"r", 1), RecipeDurable(b"4")]
    assert inbox.drain() == []
    assert inbox.put(Query(b"5", "status"))


def test_wait_ends_with_a_put_from_another_thread():
    inbox = InprocInbox(1)
    assert not inbox.wait(0.0)
    thread = threading.Thread(target=inbox.put_internal, args=(Drain(b"", 1.0),))
    thread.start()
    assert inbox.wait(60.0)
    thread.join()
    assert inbox.drain() == [Drain(b"", 1.0)]


def test_a_put_inside_a_drain_of_the_same_thread_does_not_block():
    inbox = InprocInbox(1)
    with inbox._changed:  # as a signal handler finds it
        inbox.put_internal(Drain(b"", 1.0))
    assert inbox.drain() == [Drain(b"", 1.0)]


def test_the_outbox_keeps_order_and_wakes():
    outbox = InprocOutbox()
    woken = []
    outbox.put([Stopped()])
    outbox.on_put(lambda: woken.append(1))
    outbox.put([Stopped(), Stopped()])
    assert woken == [1]
    assert outbox.wait(0.0)
    assert len(outbox.drain()) == 3
    assert not outbox.wait(0.0)
    outbox.on_put(None)
    outbox.put([Stopped()])
    assert woken == [1]
