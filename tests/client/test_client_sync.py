"""The synchronous client against a scripted daemon on a real ROUTER socket."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from held_port import HeldPort
from kvd_client import Client, errors
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import (
    Abort,
    Checkpoint,
    Credit,
    Detokenize,
    Drain,
    Failed,
    Forget,
    Generate,
    Hello,
    Pin,
    Prefixes,
    Result,
    Stats,
    Status,
    Tokenize,
    Unpin,
)
from kvd_client.results import ForgetResult, pack_tokens
from scripted_daemon import Answer, ScriptedDaemon, echo, finished, mute, tokens, wait_until
from zmq.auth.thread import ThreadAuthenticator

pytestmark = pytest.mark.socket


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def client(endpoint: str) -> Iterator[Client]:
    with Client(endpoint, timeout_s=20.0) as client:
        yield client


def test_whole_and_streamed_answers(endpoint: str, client: Client) -> None:
    with ScriptedDaemon(endpoint, echo):
        whole = client.generate("abc", max_tokens=3)
        assert (whole.text, whole.token_ids, whole.finish_reason) == (" t97 t98 t99.", (97, 98, 99), "length")
        assert (whole.usage.prompt_tokens, whole.timings.total_ms, whole.seed) == (2, 3.0, 9)
        assert (whole.usage.drafted_tokens, whole.usage.accepted_tokens) == (0, 0), "plain numbers, where nothing was told"
        assert (whole.choices[0].cumulative_logprob, whole.choices[0].score) == (None, None)
        with pytest.raises(errors.BadRequest, match="allowed_token_ids is empty"):
            client.generate("abc", allowed_token_ids=[])
        with client.generate("abc", stream=True) as stream:
            with pytest.raises(RuntimeError):
                _ = stream.completion
            chunks = list(stream)
        assert [chunk.token_ids for chunk in chunks] == [(97,), (98,), (99,), ()]
        assert "".join(chunk.text for chunk in chunks) == stream.completion.text == whole.text
        assert list(stream) == []


def test_what_is_sent_is_what_was_asked(endpoint: str, client: Client) -> None:
    bodies: list[bytes] = []

    def keep(daemon: ScriptedDaemon, message: Any, frames: list[bytes]) -> Iterable[Answer]:
        bodies.extend(frames)
        yield finished(message.request_id, 0, 0)

    with ScriptedDaemon(endpoint, keep) as daemon:
        client.generate([1, 2], n=2, temperature=0.5, seed=1, stop=["x"])
        client.chat([{"role": "user", "content": "hi"}], n=2, template_args={"tools": 1})
        first, second = daemon.wait_for_kind(Generate, 2)
    assert (first.input, first.sampling.temperature, first.sampling.seed, first.stop, first.n) == ("ids", 0.5, 1, ("x",), 2)
    assert (second.input, second.template_args) == ("messages", {"tools": 1})
    assert bodies == [pack_tokens([1, 2]), codec.pack_body([{"role": "user", "content": "hi"}])]


def test_every_operation(endpoint: str, client: Client) -> None:
    results: dict[type, tuple[Any, ...]] = {
        Pin: ({"name": "p", "tokens": 32},),
        Unpin: ({},),
        Forget: ({"blocks": 3, "pins": 1},),
        Prefixes: ({"pins": []},),
        Status: ({"state": "ready"},),
        Stats: ({"evictions": 1},),
        Checkpoint: ({"blocks": 3, "bytes": 99},),
        Drain: ({},),
        Tokenize: ({"count": 2}, pack_tokens([4, 5])),
        Detokenize: ({"count": 2}, codec.pack_body([b"Gr", b"\xc3"])),
    }

    def answer(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        data, *more = results[type(message)]
        yield (Result(op_id=message.op_id), codec.pack_body(data), *more)

    with ScriptedDaemon(endpoint, answer) as daemon:
        assert client.pin("p", messages=[{"role": "system", "content": "s"}], priority=7).details["tokens"] == 32
        client.unpin("p")
        assert client.forget(cache_salt=b"night") == ForgetResult(3, 1)
        assert client.forget(everything=True, tenant="acme") == ForgetResult(3, 1)
        assert client.prefixes() == {"pins": []}
        assert client.status() == {"state": "ready"}
        assert client.stats() == {"evictions": 1}
        checkpoint = client.checkpoint()
        assert (checkpoint.num_blocks, checkpoint.num_bytes) == (3, 99)
        assert client.tokenize("hi") == (4, 5)
        assert client.detokenize([4, 5]) == (b"Gr", b"\xc3")
        client.drain(12.0)
        assert client.ping().instance == daemon.instance.hex()
        assert client.hello().model == "m"
        assert client.wait_ready().state == "ready"
        pin, drain, forget = (daemon.wait_for_kind(kind)[0] for kind in (Pin, Drain, Forget))
    assert (pin.name, pin.input, pin.priority) == ("p", "messages", 7)
    assert drain.timeout_s == 12.0
    assert (forget.input, forget.cache_salt, forget.tenant) == ("", b"night", None)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"messages": None},
        {"tenant": "acme"},
        {"everything": True, "prompt": ""},
        {"everything": True, "messages": []},
        {"everything": True, "cache_salt": b""},
    ],
)
def test_all_of_a_tenant_is_forgotten_only_if_that_is_said(client: Client, arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="everything=True"):
        client.forget(**arguments)


@pytest.mark.parametrize("code", sorted(set(Code) - {Code.DUPLICATE, Code.STARTING, Code.DRAINING}))
def test_codes_are_raised_as_their_class(endpoint: str, client: Client, code: Code) -> None:
    def refuse(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        ids = {"request_id": message.request_id} if isinstance(message, Generate) else {"op_id": message.op_id}
        yield (Failed(code=code, message="because", retryable=True, retry_after_s=0.5, **ids),)

    with ScriptedDaemon(endpoint, refuse):
        kind = type(errors.error_of(Failed(code=code, message="")))
        for ask in (lambda: client.generate("x"), lambda: list(client.generate("x", stream=True)), client.status):
            with pytest.raises(kind, match="because") as caught:
                ask()
            assert (caught.value.code, caught.value.retry_after_s) == (code, 0.5)


# ------------------------------------------------------------------------------------------------------------- restart


def test_a_call_made_before_any_daemon_waits_for_one(endpoint: str, client: Client) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.generate, "ab")
        with ScriptedDaemon(endpoint, echo):
            assert waiting.result().token_ids == (97, 98)


def test_no_daemon_is_an_error_in_time(endpoint: str) -> None:
    with Client(endpoint, connect_timeout_s=0.05) as client, pytest.raises(errors.ConnectionLost):
        client.status()


def test_an_unbegun_request_is_answered_by_the_daemon_after(endpoint: str, client: Client) -> None:
    with ThreadPoolExecutor() as pool:
        with ScriptedDaemon(endpoint, mute) as first:
            whole = pool.submit(client.generate, "ab")
            streamed = pool.submit(lambda: list(client.generate("cd", stream=True)))
            before = first.wait_for_kind(Generate, 2)
        with ScriptedDaemon(endpoint, echo) as second:
            assert whole.result().token_ids == (97, 98)
            assert [chunk.token_ids for chunk in streamed.result()] == [(99,), (100,), ()]
            after = second.wait_for_kind(Generate, 2)
    assert {message.request_id for message in before} == {message.request_id for message in after}
    assert first.identities == second.identities


def test_death_in_the_middle_of_a_stream_interrupts_it_and_the_next_call_goes_on(endpoint: str, client: Client) -> None:
    def begin(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        yield tokens(message.request_id, 0, 1)

    with ScriptedDaemon(endpoint, begin):
        stream = client.generate("ab", stream=True)
        assert next(stream).token_ids == (1,)
    with pytest.raises(errors.Interrupted) as caught:
        next(stream)
    assert caught.value.retryable
    with pytest.raises(StopIteration):
        next(stream)
    with ScriptedDaemon(endpoint, echo):
        assert client.generate("ab").token_ids == (97, 98)


def test_what_a_dying_daemon_said_last_arrives(endpoint: str, client: Client) -> None:
    for _ in range(5):
        with ScriptedDaemon(endpoint, mute) as daemon:
            stream = client.generate("ab", stream=True)
            (message,) = daemon.wait_for_kind(Generate)
            for i in range(200):
                daemon.say(*tokens(message.request_id, i, i))
            daemon.say(*finished(message.request_id, 200))
        assert len(list(stream)) == 201


def test_a_starting_daemon_is_waited_for(endpoint: str, client: Client) -> None:
    def answer(daemon: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        if daemon.state == "ready":
            yield from echo(daemon, message, bodies)
        else:
            yield (Failed(request_id=message.request_id, code="starting", message="loading", retryable=True, retry_after_s=0.05),)

    with ScriptedDaemon(endpoint, answer, state="starting") as daemon, ThreadPoolExecutor() as pool:
        waiting, ready = pool.submit(client.generate, "ab"), pool.submit(client.wait_ready)
        asked = daemon.wait_for_kind(Generate, 3)
        assert not ready.done()
        daemon.state = "ready"
        assert waiting.result().token_ids == (97, 98)
        assert ready.result().state == "ready"
    assert len({message.request_id for message in asked}) == 1


def test_an_impatient_client_hears_starting(endpoint: str) -> None:
    def refuse(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        yield (Failed(request_id=message.request_id, code="starting", message="loading", retryable=True, retry_after_s=4.0),)

    with ScriptedDaemon(endpoint, refuse), Client(endpoint, wait_until_ready=False) as client:
        with pytest.raises(errors.NotReady) as caught:
            client.generate("x")
        assert caught.value.retry_after_s == 4.0


def test_a_daemon_that_stops_answering_gets_a_new_connection_with_the_old_identity(endpoint: str) -> None:
    class Deaf(ScriptedDaemon):
        deaf = False

        def _answers(self, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
            return [] if self.deaf else super()._answers(message, bodies)

    with (
        Deaf(endpoint, echo, ROUTER_HANDOVER=1) as daemon,
        Client(endpoint, timeout_s=20.0, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.5) as client,
    ):
        client.generate("a")
        num_hellos = len(daemon.wait_for_kind(Hello))
        daemon.deaf = True
        daemon.wait_for_kind(Hello, num_hellos + 1)
        daemon.deaf = False
        assert client.generate("ab").token_ids == (97, 98)
        # what was unread of a connection when another took its identity comes under one of the ROUTER's own, which begins with zero
        assert len({identity for identity in daemon.identities if identity[0]}) == 1


# ------------------------------------------------------------------------------------------------- credit and aborting


def test_a_slow_reader_stalls_its_own_stream_alone(endpoint: str, client: Client) -> None:
    sent: dict[bytes, int] = {}
    credit: dict[bytes, int] = {}

    def metered(daemon: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        if isinstance(message, Generate):
            sent[message.request_id], credit[message.request_id] = 0, message.credit
        elif isinstance(message, Credit):
            credit[message.request_id] += message.num_tokens
        while credit[message.request_id] and sent[message.request_id] < 100:
            yield tokens(message.request_id, sent[message.request_id], 1)
            sent[message.request_id] += 1
            credit[message.request_id] -= 1
            if sent[message.request_id] == 100:
                yield finished(message.request_id, 100)

    with ScriptedDaemon(endpoint, metered) as daemon:
        slow = client.generate("a", stream=True, window_tokens=8)
        (asked,) = daemon.wait_for_kind(Generate)
        assert len(list(client.generate("b", stream=True, window_tokens=8))) == 101
        assert sent[asked.request_id] == 8
        for _ in range(4):
            next(slow)
        wait_until(lambda: sent[asked.request_id] == 12)
        assert len(list(slow)) == 97


@pytest.mark.parametrize("how", ["close", "drop", "with", "timeout", "client"])
def test_whoever_stops_reading_aborts(endpoint: str, how: str) -> None:
    def begin(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        if isinstance(message, Generate):
            yield tokens(message.request_id, 0, 1)

    with ScriptedDaemon(endpoint, begin) as daemon:
        client = Client(endpoint)
        stream = client.generate("a", stream=True, timeout_s=1.5 if how == "timeout" else 20.0)
        next(stream)
        if how == "close":
            stream.close()
        elif how == "drop":
            del stream
            gc.collect()
        elif how == "with":
            with stream:
                pass
        elif how == "timeout":
            with pytest.raises(errors.Timeout):
                next(stream)
        else:
            client.close()
        (asked,), (abort,) = daemon.wait_for_kind(Generate), daemon.wait_for_kind(Abort)
        assert abort.request_id == asked.request_id
        client.close()


def test_closing_a_stream_frees_a_reader_that_waits(endpoint: str, client: Client) -> None:
    with ScriptedDaemon(endpoint, mute) as daemon, ThreadPoolExecutor() as pool:
        stream = client.generate("a", stream=True)
        reader = pool.submit(lambda: next(stream))
        daemon.wait_for_kind(Generate)
        stream.close()
        with pytest.raises(errors.ClientClosed):
            reader.result()


def test_closing_the_client_ends_every_call_of_every_thread(endpoint: str, client: Client) -> None:
    with ScriptedDaemon(endpoint, mute) as daemon, ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(client.generate, "x") for _ in range(4)] + [pool.submit(client.status) for _ in range(4)]
        daemon.wait_for_kind(Generate, 4)
        client.close()
        for call in calls:
            with pytest.raises(errors.ClientClosed):
                call.result()
    with pytest.raises(errors.ClientClosed):
        client.generate("x")
    client.close()


def test_ctrl_c_aborts(endpoint: str) -> None:
    program = "import sys; from kvd_client import Client; Client(sys.argv[1]).generate('x')"
    with ScriptedDaemon(endpoint, mute) as daemon:
        process = subprocess.Popen([sys.executable, "-c", program, endpoint], stderr=subprocess.PIPE, text=True)
        (asked,) = daemon.wait_for_kind(Generate)
        process.send_signal(2)
        _, trace = process.communicate(timeout=60)
        assert daemon.wait_for_kind(Abort) == [Abort(request_id=asked.request_id)]
    assert trace.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_ctrl_c_just_when_it_was_handed_over_aborts(endpoint: str, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    with ScriptedDaemon(endpoint, mute) as daemon, Client(endpoint, timeout_s=600.0) as client:
        hand_over = client._io.open

        def interrupted(call: Any) -> None:
            hand_over(call)
            daemon.wait_for_kind(Generate)
            raise KeyboardInterrupt

        monkeypatch.setattr(client._io, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.generate("x", stream=stream)
        (asked,) = daemon.wait_for_kind(Generate)
        assert daemon.wait_for_kind(Abort) == [Abort(request_id=asked.request_id)]


def test_after_ctrl_c_where_the_thread_is_woken_it_is_woken_again(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        ScriptedDaemon(endpoint, echo),
        Client(endpoint, timeout_s=20.0, heartbeat_interval_s=1000.0, heartbeat_timeout_s=2000.0) as client,
    ):
        io, sleeps = client._io, threading.Event()
        poll_ms, receive = io._poll_ms, io._receive

        def falls_asleep() -> int:
            wait_ms = poll_ms()
            sleeps.set()
            return wait_ms

        def is_awake() -> None:
            sleeps.clear()
            receive()

        def interrupted() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(io, "_poll_ms", falls_asleep)
        monkeypatch.setattr(io, "_receive", is_awake)
        client.generate("a")
        client.generate("a")  # the connection is settled: now it sleeps until it is woken
        assert sleeps.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(io, "_wake", interrupted)
            with pytest.raises(KeyboardInterrupt):
                io._submit(lambda _session, _now: None)
        wake, wakes = io._wake, []
        monkeypatch.setattr(io, "_wake", lambda: (wakes.append(True), wake()))
        assert client.generate("ab").token_ids == (97, 98)
        assert wakes


def test_a_client_that_nobody_closed_does_not_keep_the_process(endpoint: str) -> None:
    program = "import sys; from kvd_client import Client; c = Client(sys.argv[1]); print(c.generate('a').text)"
    with ScriptedDaemon(endpoint, echo):
        done = subprocess.run([sys.executable, "-c", program, endpoint], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (" t97.\n", "")


def test_eight_threads_share_a_client(endpoint: str, client: Client) -> None:
    def work(thread: int) -> None:
        for i in range(25):
            prompt = f"{thread}:{i}"
            expected = tuple(prompt.encode())
            if i % 3:
                assert client.generate(prompt).token_ids == expected
            else:
                assert tuple(token for chunk in client.generate(prompt, stream=True) for token in chunk.token_ids) == expected

    with ScriptedDaemon(endpoint, echo) as daemon, ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, thread) for thread in range(8)]:
            done.result()
        assert len(daemon.identities) == 1
        assert len(daemon.wait_for_kind(Hello)) == 1


def test_a_forked_child_is_refused_instead_of_hanging(endpoint: str) -> None:
    program = (
        "import os, sys\nfrom kvd_client import Client, errors\nclient = Client(sys.argv[1])\n"
        "if os.fork() == 0:\n    try:\n        client.status()\n    except errors.ClientClosed:\n        os._exit(7)\n    os._exit(1)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program, endpoint], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "7\n"


def test_closing_leaves_no_thread_and_no_descriptor(endpoint: str) -> None:
    with ScriptedDaemon(endpoint, echo):
        with Client(endpoint) as client:
            client.generate("a")
        threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(10):  # more than what the first one's end, or an earlier test's, may have left to be closed when it was counted
            with Client(endpoint) as client:
                client.generate("a")
        wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors)
        wait_until(lambda: threading.active_count() <= threads)


# ----------------------------------------------------------------------------------------------------- endpoints, keys


def test_wrong_endpoints_and_keys_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad endpoint"):
        Client("gopher://x")
    with pytest.raises(ValueError, match="40 characters"):
        Client("tcp://127.0.0.1:1", server_key="short")
    public, _ = zmq.auth.create_certificates(tmp_path, "c")
    with pytest.raises(ValueError, match="no secret key"):
        Client("tcp://127.0.0.1:1", server_key="x" * 40, client_key_file=public)
    with pytest.raises(FileNotFoundError):
        Client("tcp://127.0.0.1:1", server_key="x" * 40, client_key_file=tmp_path / "nowhere")


def test_curve_with_the_right_key(tmp_path: Path) -> None:
    server_public, server_secret = zmq.curve_keypair()
    _, key_file = zmq.auth.create_certificates(tmp_path, "c")
    with (
        HeldPort() as port,
        ScriptedDaemon(
            endpoint := f"tcp://127.0.0.1:{port.number}",
            echo,
            CURVE_SERVER=1,
            CURVE_PUBLICKEY=server_public,
            CURVE_SECRETKEY=server_secret,
        ),
        Client(endpoint, timeout_s=20.0, server_key=server_public.decode(), client_key_file=key_file) as client,
    ):
        assert client.generate("a").token_ids == (97,)


def test_a_key_that_the_daemon_does_not_know(tmp_path: Path) -> None:
    server_public, server_secret = zmq.curve_keypair()
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="kvd", location=str(allowed))
        router.setsockopt(zmq.ZAP_DOMAIN, b"kvd")
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_PUBLICKEY, server_public)
        router.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with Client(f"tcp://127.0.0.1:{port}", server_key=server_public.decode()) as client, pytest.raises(errors.AuthenticationFailed):
            client.status()
        authenticator.stop()


def test_curve_on_one_side_alone_is_told_at_once_and_forgotten_when_it_is_mended(endpoint: str) -> None:
    server_public, server_secret = zmq.curve_keypair()
    keys = {"CURVE_SERVER": 1, "CURVE_PUBLICKEY": server_public, "CURVE_SECRETKEY": server_secret}
    with Client(endpoint, timeout_s=20.0) as client:
        with ScriptedDaemon(endpoint, echo, **keys), pytest.raises(errors.AuthenticationFailed, match="demands CURVE"):
            client.status()
        with ScriptedDaemon(endpoint, echo):
            wait_until(lambda: _answers(client))
            assert client.generate("a").token_ids == (97,)


def _answers(client: Client) -> bool:
    try:
        client.ping()
    except errors.AuthenticationFailed:
        return False
    return True


def test_a_wrong_server_key_is_suspected(endpoint: str) -> None:
    server_public, server_secret = zmq.curve_keypair()
    other, _ = zmq.curve_keypair()
    with (
        ScriptedDaemon(endpoint, echo, CURVE_SERVER=1, CURVE_PUBLICKEY=server_public, CURVE_SECRETKEY=server_secret),
        Client(endpoint, connect_timeout_s=0.5, server_key=other.decode()) as client,
        pytest.raises(errors.ConnectionLost, match="server_key may be another daemon's"),
    ):
        client.status()
