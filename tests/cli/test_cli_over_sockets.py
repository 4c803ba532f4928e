"""The commands as processes, over real sockets, against a scripted daemon: what a script sees."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator

import pytest
import zmq
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import (
    Abort,
    ChoiceEnd,
    Failed,
    Finished,
    Generate,
    Hello,
    HelloReply,
    Limits,
    Ping,
    Pong,
    Result,
    Status,
    Timings,
    Tokens,
    Usage,
)

from kvd.cli.exits import Exit

pytestmark = pytest.mark.socket

INSTANCE = b"i" * 16
LIMITS = Limits(max_message_bytes=1 << 20, max_model_len=1024, max_choices=4, max_stop_strings=4, default_credit=64)


class ScriptedDaemon:
    """Answers the small messages at once; how a generation goes on, ``on_generate`` says."""

    def __init__(self, endpoint: str, on_generate, state: str = "ready") -> None:
        self.endpoint = endpoint
        self.messages: queue.SimpleQueue = queue.SimpleQueue()
        self._on_generate = on_generate
        self._state = state
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def wait_for(self, kind):
        while not isinstance(message := self.messages.get(timeout=30), kind):
            pass
        return message

    def _run(self) -> None:
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.bind(self.endpoint)
        while not self._stop.is_set():
            if router.poll(20):
                identity, *frames = router.recv_multipart()
                message, _ = codec.decode_client(frames)
                self.messages.put(message)
                for answer in self._answers(message):
                    router.send_multipart([identity, *answer])
        context.destroy(linger=0)

    def _answers(self, message):
        match message:
            case Hello():
                return [codec.encode(HelloReply(instance=INSTANCE, version="1", protocol=(1, 1), state=self._state, limits=LIMITS))]
            case Ping():
                return [codec.encode(Pong(nonce=message.nonce, instance=INSTANCE, state=self._state))]
            case Status():
                return [codec.encode(Result(op_id=message.op_id), codec.pack_body({"state": self._state}))]
            case Generate():
                return self._on_generate(message)
            case Abort():
                end = (ChoiceEnd(choice=0, finish_reason="aborted", num_tokens=2),)
                return [codec.encode(Finished(request_id=message.request_id, choices=end, usage=Usage(), timings=Timings()))]
        return []


def tokens(message: Generate, first_index: int, ids: list[int], text: str):
    return codec.encode(Tokens(request_id=message.request_id, choice=0, first_index=first_index), array("I", ids).tobytes(), text.encode())


def whole_answer(message: Generate):
    end = (ChoiceEnd(choice=0, finish_reason="stop", num_tokens=3, text_tail="!"),)
    usage = Usage(prompt_tokens=5, completion_tokens=3)
    finished = Finished(request_id=message.request_id, choices=end, usage=usage, timings=Timings(ttft_ms=1.5))
    return [tokens(message, 0, [7, 8], "Grüß"), tokens(message, 2, [9], " dich"), codec.encode(finished)]


@contextlib.contextmanager
def kvd(endpoint: str, *arguments: str, **options) -> Iterator[subprocess.Popen]:
    """A command, ended with the block: a test that fails must not wait for it."""
    environ = {**os.environ, "KVD_CONNECT": endpoint, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "kvd", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def endpoint(tmp_path) -> str:
    return f"ipc://{tmp_path}/kvd.sock"


def test_generate_over_the_wire(endpoint):
    with ScriptedDaemon(endpoint, whole_answer), kvd(endpoint, "generate", "--prompt", "hi", "--stream", "--json") as process:
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    printed = json.loads(out)
    assert (printed["text"], printed["token_ids"], printed["finish_reason"]) == ("Grüß dich!", [7, 8, 9], "stop")
    assert printed["timings"]["ttft_ms"] == 1.5
    assert err == "Grüß dich!\n"


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_ctrl_c_aborts_the_request_and_exits_130(endpoint, flags):
    def begin(message: Generate):
        return [tokens(message, 0, [1, 2], "once upon")]

    with ScriptedDaemon(endpoint, begin) as daemon, kvd(endpoint, "generate", "--prompt", "hi", *flags) as process:
        request = daemon.wait_for(Generate)
        if flags:
            assert process.stdout.read(9) == "once upon"
        process.send_signal(signal.SIGINT)
        aborted = daemon.wait_for(Abort)
        _, err = process.communicate(timeout=30)
    assert aborted.request_id == request.request_id
    assert process.returncode == Exit.INTERRUPTED
    assert err == ""


def test_a_failure_reaches_the_exit_code(endpoint):
    def refuse(message: Generate):
        failed = Failed(code=Code.OVERLOADED, message="1024 requests wait", request_id=message.request_id, retryable=True)
        return [codec.encode(failed)]

    with ScriptedDaemon(endpoint, refuse), kvd(endpoint, "generate", "--prompt", "hi") as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (Exit.TEMPORARY, "")
    assert err == "kvd: overloaded: 1024 requests wait\n"


def test_a_starting_daemon_tells_its_status_and_takes_no_requests(endpoint):
    with ScriptedDaemon(endpoint, whole_answer, state="rehydrating"):
        with kvd(endpoint, "status", "--json") as process:
            out, _ = process.communicate(timeout=30)
        assert json.loads(out) == {"state": "rehydrating"}
        with kvd(endpoint, "generate", "--prompt", "hi") as process:
            _, err = process.communicate(timeout=30)
    assert process.returncode == Exit.UNAVAILABLE
    assert "is rehydrating; --wait" in err


def test_without_a_daemon_ping_ends_with_69(endpoint):
    with kvd(endpoint, "ping", "--timeout", "0.5") as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (Exit.UNAVAILABLE, "")
    assert err.startswith(f"kvd: no daemon answers at {endpoint}")
    assert err.count(endpoint) == 1
    assert err.endswith("; `kvd serve` starts one\n")
