"""The server over real sockets."""

from __future__ import annotations

import os
import socket as sockets
import stat
import time

import pytest
import zmq
from edge_fakes import INSTANCE, ByteText
from kvd_client.protocol.codec import unpack_body
from kvd_client.protocol.messages import Credit, Failed, Finished, Generate, Hello, HelloReply, Ping, Pong, Stats, Status, Tokens

from kvd.transport.bodies import TextJob
from kvd.transport.errors import EndpointError, EndpointInUseError
from kvd.transport.text_threads import TextThreads

pytestmark = pytest.mark.socket


def eventually(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def wait_for_text(client):
    """The text model is loaded off the poller: ask until a request is served."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        client.send(Generate(request_id=os.urandom(16), input="text", max_tokens=1), b"x")
        while True:
            message, _ = client.receive()
            if isinstance(message, Finished):
                return
            if isinstance(message, Failed):
                assert message.code == "starting"
                break
        time.sleep(0.01)
    raise TimeoutError


@pytest.fixture
def served(start_server, connect):
    def serve(**options):
        running = start_server(**options)
        client = connect(running.url)
        wait_for_text(client)
        return running, client

    return serve


def test_a_request_over_ipc_and_over_tcp_at_once(served, connect, tmp_path):
    running, client = served(listen=(f"ipc://{tmp_path}/kvd.sock", "tcp://127.0.0.1:*"))
    other = connect(running.urls[1])
    reply, _ = other.ask(Hello())
    assert isinstance(reply, HelloReply)
    assert reply.instance == INSTANCE
    assert client.generate(b"hello ", max_tokens=8)[0] == "hello he"
    assert other.generate(b"there", max_tokens=5)[0] == "there"


def test_two_endpoints_keep_equal_identities_apart(served, connect, tmp_path):
    running, _ = served(listen=(f"ipc://{tmp_path}/kvd.sock", "tcp://127.0.0.1:*"))
    one = connect(running.urls[0], identity=b"same")
    two = connect(running.urls[1], identity=b"same")
    one.send(Ping(nonce=1))
    two.send(Ping(nonce=2))
    assert one.receive()[0].nonce == 1
    assert two.receive()[0].nonce == 2


def test_the_socket_is_for_owner_and_group(start_server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    old = os.umask(0)
    try:
        start_server(listen=(f"ipc://{tmp_path}/kvd/kvd.sock",))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "kvd" / "kvd.sock").stat().st_mode) == 0o660
    assert stat.S_IMODE((tmp_path / "kvd").stat().st_mode) == 0o750


def test_a_live_socket_is_not_stolen(served, start_server, tmp_path):
    _, client = served()
    with pytest.raises(EndpointInUseError, match="another process listens here"):
        start_server()
    assert client.generate()[0] == "abcab"


def test_a_dead_socket_is_replaced_and_the_file_removed_at_the_end(start_server, connect, tmp_path):
    path = tmp_path / "kvd.sock"
    dead = sockets.socket(sockets.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    running = start_server()
    assert isinstance(connect(running.url).ask(Ping())[0], Pong)
    running.stop()
    assert not path.exists()


def test_a_file_in_the_way_is_left_alone(start_server, tmp_path):
    (tmp_path / "kvd.sock").write_text("precious")
    with pytest.raises(EndpointError, match="not a socket"):
        start_server()
    assert (tmp_path / "kvd.sock").read_text() == "precious"


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*", "tcp://192.0.2.1:5555"])
def test_plain_tcp_beyond_this_machine_is_refused(start_server, url):
    with pytest.raises(EndpointError, match="allow_plain_tcp"):
        start_server(listen=(url,))


def test_plain_tcp_beyond_this_machine_with_the_flag(start_server, connect):
    running = start_server(listen=("tcp://0.0.0.0:*",), allow_plain_tcp=True)
    assert isinstance(connect(running.url.replace("0.0.0.0", "127.0.0.1")).ask(Ping())[0], Pong)


def test_a_taken_port_is_a_clear_error(start_server):
    running = start_server(listen=("tcp://127.0.0.1:*",))
    with pytest.raises(EndpointInUseError, match=r"127\.0\.0\.1.*in use"):
        start_server(listen=(running.url,))


def test_status_and_stats_before_the_engine_is_ready(start_server, connect):
    client = connect(start_server(state="rehydrating").url)
    eventually(lambda: client.ask(Ping())[0].state == "rehydrating")
    _, bodies = client.ask(Status(op_id=bytes(16)))
    assert unpack_body(bodies[0]) == {"state": "rehydrating", "from": "snapshot"}
    failed, _ = client.ask(Generate(request_id=os.urandom(16), input="text"), b"x")
    assert (failed.code, failed.retryable, failed.retry_after_s) == ("starting", True, 7.0)


def test_a_slow_text_model_leaves_the_edge_responsive(start_server, connect):
    import threading

    release = threading.Event()

    def load():
        release.wait(30)
        return ByteText()

    client = connect(start_server(load_text=load).url)
    assert isinstance(client.ask(Ping())[0], Pong)
    failed, _ = client.ask(Generate(request_id=os.urandom(16), input="text"), b"x")
    assert failed.code == "starting"
    release.set()
    wait_for_text(client)


def test_a_text_model_that_cannot_be_loaded_is_reported(start_server, failures):
    def load():
        raise OSError("no such tokenizer")

    start_server(load_text=load)
    eventually(lambda: failures)
    assert "no such tokenizer" in failures.pop()


def test_a_panic_of_the_tokenizer_is_that_messages_alone(served):
    class Panic(BaseException):
        pass

    class Faulty(ByteText):
        def encode(self, text):
            if text == "boom":
                raise Panic
            return super().encode(text)

    running, client = served(load_text=Faulty)
    for _ in range(3):
        failed, _ = client.ask(Generate(request_id=os.urandom(16), input="text"), b"boom")
        assert failed.code == "internal"
    assert client.generate()[0] == "abcab"
    assert running.server._session.counters.internal_errors == 3


def test_a_text_thread_that_dies_is_a_failure_of_the_edge():
    failures = []

    def refuse(result):
        raise ZeroDivisionError

    threads = TextThreads(1, load=ByteText, date="", on_loaded=lambda text: None, on_failed=failures.append, on_result=refuse)
    threads.start()
    threads.submit(TextJob(number=1, peer=b"p", input="text", body=b"x"))
    eventually(lambda: failures)
    assert isinstance(failures[0], ZeroDivisionError)


def test_a_client_that_does_not_read_stalls_alone(served, connect):
    running, client = served(default_credit=32)
    slow = connect(running.url, rcvhwm=1, rcvbuf=4096)
    for _ in range(20):
        slow.send(Generate(request_id=os.urandom(16), input="text", max_tokens=400, stop_token_ids=()), b"x" * 100)
    assert client.generate(b"quick", max_tokens=400)[1].choices[0].num_tokens == 400
    counts = {}
    finished = 0
    while finished < 20:
        message, bodies = slow.receive()
        if isinstance(message, Tokens):
            counts[message.request_id] = counts.get(message.request_id, 0) + len(bodies[0]) // 4
        else:
            assert isinstance(message, Finished)
            finished += 1
    assert set(counts.values()) == {400}


def test_what_waits_for_a_client_that_never_reads_is_bounded(served, connect):
    running, client = served(default_credit=4096, max_backlog_bytes=100_000)
    dead = connect(running.url, rcvhwm=1, rcvbuf=4096)
    for _ in range(60):
        dead.send(Generate(request_id=os.urandom(16), input="text", max_tokens=490, credit=10**9), b"x" * 20)
    sender, peer = running.server._sender, lambda: next(iter(list(running.server._sender._backlogs)), None)  # the edge's thread changes it
    highest = 0

    def overflown():
        nonlocal highest
        name = peer()
        highest = max(highest, sender.backlog_bytes(name) if name else 0)
        return running.server._session.counters.clients_too_slow > 0

    eventually(overflown)
    assert highest <= 200_000
    assert client.generate()[0] == "abcab"
    eventually(lambda: running.engine.engine.num_requests == 0)


def test_explicit_credit_over_the_wire(served):
    _, client = served()
    request_id = os.urandom(16)
    client.send(Generate(request_id=request_id, input="text", max_tokens=6, credit=2), b"abc")
    assert [isinstance(client.receive()[0], Tokens) for _ in range(2)] == [True, True]
    assert client.is_quiet()
    client.send(Credit(request_id=request_id, num_tokens=10))
    text, finished = client.finish(request_id)
    assert text == "cabc"
    assert finished.choices[0].num_tokens == 6


def test_a_client_that_comes_back_under_its_identity_keeps_its_stream(served, connect):
    running, _ = served()
    request_id = os.urandom(16)
    first = connect(running.url, identity=b"Tsteady")
    first.send(Generate(request_id=request_id, input="text", max_tokens=6, credit=2), b"abc")
    for _ in range(2):
        first.receive()
    first.close()
    second = connect(running.url, identity=b"Tsteady")
    second.send(Credit(request_id=request_id, num_tokens=10))
    assert second.finish(request_id)[0] == "cabc"


def test_a_vanished_clients_requests_are_aborted(served, connect):
    running, _ = served()
    gone = connect(running.url)
    gone.send(Generate(request_id=os.urandom(16), input="text", max_tokens=500, credit=3), b"abc")
    for _ in range(3):
        gone.receive()
    gone.send(Credit(request_id=bytes(16), num_tokens=1))
    gone.receive()
    gone.close()
    running.engine.engine._requests[next(iter(running.engine.engine._requests))]["credit"] += 100
    eventually(lambda: running.engine.engine.num_requests == 0)
    assert running.server._session.counters.clients_gone == 1


def test_a_redelivered_request_over_the_wire(served):
    _, client = served()
    message = Generate(request_id=os.urandom(16), input="text", max_tokens=5)
    client.send(message, b"abc")
    client.send(message, b"abc")
    assert client.finish(message.request_id)[0] == "abcab"
    client.send(message, b"abc")
    failed, _ = client.receive()
    assert not isinstance(failed, Tokens), "it ran twice"
    assert failed.code == "duplicate"


def test_a_full_engine_inbox_is_overloaded(start_server, connect):
    running = start_server(inbox_capacity=0)
    client = connect(running.url)

    def code():
        return client.ask(Generate(request_id=os.urandom(16), input="text"), b"x")[0].code

    eventually(lambda: code() == "overloaded")
    _, bodies = client.ask(Stats(op_id=bytes(16)))
    assert unpack_body(bodies[0])["transport"]["requests_failed"] > 0


def test_the_end_of_the_engine_ends_requests_and_server(served):
    running, client = served()
    client.send(Generate(request_id=os.urandom(16), input="text", max_tokens=500, credit=1), b"abc")
    assert isinstance(client.receive()[0], Tokens)
    running.stop()
    failed, _ = client.receive()
    assert (failed.code, failed.retryable) == ("draining", True)
    assert not running.server.is_alive()


def test_stop_without_an_engine(start_server):
    running = start_server()
    assert running.server.stop(60)


def test_raw_tcp_rubbish_does_not_disturb(served, connect):
    running, client = served(listen=("tcp://127.0.0.1:*",))
    host, port = running.url.removeprefix("tcp://").split(":")
    for rubbish in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\xff\0\0\0\0\0\0\0\1\x7f" + b"\xff" * 60, b""):
        with sockets.create_connection((host, int(port)), timeout=30) as raw:
            raw.sendall(rubbish)
    assert client.generate()[0] == "abcab"


def test_a_frame_beyond_the_limit_costs_the_connection_and_nothing_else(served, connect):
    running, client = served(max_message_bytes=1000)
    slightly = connect(running.url)
    failed, _ = slightly.ask(Generate(request_id=os.urandom(16), input="text"), bytes(2000))
    assert failed.code == "too_large"
    far = connect(running.url)
    far.socket.setsockopt(zmq.RECONNECT_IVL, -1)
    far.send(Generate(request_id=os.urandom(16), input="text"), bytes(200_000))
    assert far.is_quiet()
    assert client.generate()[0] == "abcab"
