"""The end of the edge: what clients are owed reaches those that read, and those that don't hold nobody up."""

from __future__ import annotations

import os
import socket as sockets
import threading
import time
from pathlib import Path

import pytest
from kvd_client.protocol.messages import Failed, Finished, Generate, Tokens

from kvd.commands import Stopped
from kvd.transport import server
from kvd.transport.closing import hold_connections, wait_until_read
from kvd.transport.edge import Outgoing
from kvd.transport.sending import Attempt, Sender

pytestmark = pytest.mark.socket


def far_from_now():
    return time.monotonic() + 60


def test_a_connection_is_held_until_its_peer_has_read(tmp_path):
    path = str(tmp_path / "s")
    with sockets.socket(sockets.AF_UNIX) as listener, sockets.socket(sockets.AF_UNIX) as peer:
        listener.bind(path)
        listener.listen()
        peer.connect(path)
        accepted, _ = listener.accept()
        accepted.sendall(b"x" * 10_000)
        held = hold_connections([path])
        accepted.close()
        assert len(held) == 1, "neither the listening socket nor the peer's own"
        assert not wait_until_read(hold_connections([str(tmp_path / "other")]) + held, time.monotonic())
        assert peer.recv(100) == b"x" * 100, "given up, not destroyed"


def test_waiting_ends_when_everything_is_read_or_the_peer_is_gone(tmp_path):
    path = str(tmp_path / "s")
    for action in ("read", "close"):
        with sockets.socket(sockets.AF_UNIX) as listener, sockets.socket(sockets.AF_UNIX) as peer:
            listener.bind(path)
            listener.listen()
            peer.connect(path)
            accepted, _ = listener.accept()
            accepted.sendall(b"x" * 10_000)
            held = hold_connections([path])
            accepted.close()
            ended = []
            waiter = threading.Thread(target=lambda held=held, ended=ended: ended.append(wait_until_read(held, far_from_now())))
            waiter.start()
            if action == "read":
                assert peer.recv(20_000, sockets.MSG_WAITALL)
            else:
                peer.close()
            waiter.join(30)
            assert ended == [True]
        Path(path).unlink()


def test_stream_messages_give_way_to_terminal_ones_on_demand():
    taken = []
    state = Attempt.FULL

    def attempt(out):
        if state is Attempt.SENT:
            taken.append(out)
        return state

    sender = Sender(
        attempt=attempt,
        on_sent=lambda out: None,
        on_dropped=lambda number: None,
        on_gone=lambda peer: None,
        on_overflow=lambda peer: None,
        max_backlog_bytes=10_000,
        max_total_backlog_bytes=10_000,
    )
    sender.send(Outgoing(b"a", [b"stream"], b"id", 1), 0.0)
    sender.send(Outgoing(b"a", [b"terminal"]), 0.0)
    sender.drop_stream_messages()
    assert sender.total_bytes == sender.backlog_bytes(b"a") == len(b"terminal") + 256
    state = Attempt.SENT
    sender.retry(0.0)
    assert [out.frames for out in taken] == [[b"terminal"]]
    assert sender.total_bytes == 0


NUM_STREAMS = 30


def begin_streams(client, max_tokens=450):
    ids = {os.urandom(16) for _ in range(NUM_STREAMS)}
    for request_id in ids:
        client.send(Generate(request_id=request_id, input="text", max_tokens=max_tokens), b"x" * 20)
    return ids


def wait_for_backlog(running):
    deadline = time.monotonic() + 60
    while running.server._sender.total_bytes < 500_000:
        assert time.monotonic() < deadline, "nothing waits"
        time.sleep(0.005)


def serve(start_server, connect, **options):
    """A server with a client that has streams and has read nothing."""
    running = start_server(default_credit=512, **options)
    client = connect(running.url, rcvhwm=4)
    while True:
        client.send(Generate(request_id=os.urandom(16), input="text", max_tokens=1), b"x")
        message = client.receive()[0]
        if isinstance(message, Tokens):
            client.receive()
            break
        time.sleep(0.01)
    ids = begin_streams(client)
    wait_for_backlog(running)
    return running, client, ids


def end_engine(running, flush_s):
    """The engine ends, its streams unfinished."""
    running.is_ended = True
    running.engine._ending.set()
    running.engine._thread.join()
    running.outbox.put([Stopped(flush_s)])


def test_a_slow_reader_gets_everything_while_there_is_time(start_server, connect):
    running, client, ids = serve(start_server, connect)
    end_engine(running, 600.0)
    counts = dict.fromkeys(ids, 0)
    ended = set()
    while ended < ids:
        message, bodies = client.receive(60)
        if isinstance(message, Tokens):
            assert message.first_index == counts[message.request_id], "nothing was dropped"
            counts[message.request_id] += len(bodies[0]) // 4
        else:
            assert isinstance(message, Failed | Finished)
            ended.add(message.request_id)
    assert running.server.join(30)
    assert running.server._session.counters.messages_dropped == 0
    assert max(counts.values()) > 0


def test_what_the_kernel_holds_for_a_slow_reader_is_not_lost_by_the_hang_up(start_server, connect):
    running = start_server()
    reader = connect(running.url, rcvhwm=1)
    while isinstance(reader.ask(Generate(request_id=os.urandom(16), input="text", max_tokens=1), b"x")[0], Failed):
        time.sleep(0.01)
    reader.receive()
    request_id = os.urandom(16)
    reader.send(Generate(request_id=request_id, input="text", max_tokens=450), b"x" * 20)
    counters = running.server._session.counters
    deadline = far_from_now()
    while counters.requests_finished < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    end_engine(running, 600.0)
    while Path(running.url.removeprefix("ipc://")).exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.2)  # the sockets are closing: what was not held would be gone soon
    text, finished = reader.finish(request_id)
    assert text == "x" * 450
    assert finished.choices[0].num_tokens == 450
    assert running.server.join(60)


def test_without_time_for_all_the_terminal_messages_come(start_server, connect, monkeypatch):
    monkeypatch.setattr(server, "_TERMINAL_S", 600.0)
    running, client, ids = serve(start_server, connect)
    end_engine(running, 600.0)  # all of it is the terminal messages' own
    ended, num_tokens = set(), 0
    while ended < ids:
        message, _ = client.receive(60)
        if isinstance(message, Tokens):
            num_tokens += 1
        else:
            ended.add(message.request_id)
    assert running.server._session.counters.messages_dropped > 0
    assert running.server.join(30)


def test_who_reads_nothing_holds_up_the_end_for_the_flush_alone(start_server, connect):
    running, _, _ = serve(start_server, connect)
    began = time.monotonic()
    end_engine(running, 0.5)
    assert running.server.join(60), "it never ended"
    assert time.monotonic() - began >= 0.4, "it was given its time"
    assert not Path(running.url.removeprefix("ipc://")).exists()


def test_clients_are_answered_during_the_flush(start_server, connect):
    running, _, _ = serve(start_server, connect)
    end_engine(running, 600.0)
    other = connect(running.url)
    failed, _ = other.ask(Generate(request_id=os.urandom(16), input="text"), b"x")
    assert (failed.code, failed.retryable) == ("draining", True)
    running.server._flush_deadline_s = time.monotonic()
    assert running.server.join(60)


def test_without_the_engines_last_words_nothing_is_waited_for(start_server, connect):
    running, _, _ = serve(start_server, connect)
    running.is_ended = True
    running.engine._ending.set()
    running.engine._thread.join()
    assert running.server.stop(60)
    assert running.server._sender.has_backlog, "left behind"
