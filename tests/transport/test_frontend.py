"""The edge as a thread and as a process, from socket to inbox and back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from edge_client import RawClient
from edge_fakes import INSTANCE, EngineThread
from kvd_client.protocol.codec import pack_body, unpack_body
from kvd_client.protocol.messages import Checkpoint, Failed, Finished, Generate, Hello, Pin, Sampling, Stats, Tokens

from kvd.commands import Abort, CheckpointNow, Command, OpDone, PinPrefix, Submit, TokensOut
from kvd.config import ObserveConfig, TransportConfig
from kvd.frontend import _encode, _send_commands, start_frontend
from kvd.transport.errors import EndpointInUseError
from kvd.transport.inproc import InprocInbox, InprocOutbox

pytestmark = pytest.mark.socket


class Running:
    def __init__(self, tmp_path, mode, *, text_source="bytes", capacity=4096, listen=None):
        self.failures = []
        self.inbox, self.outbox = InprocInbox(capacity), InprocOutbox()
        self.frontend = start_frontend(
            TransportConfig(listen=listen or (f"ipc://{tmp_path}/kvd.sock",), frontend=mode),
            text_source=text_source,
            inbox=self.inbox,
            outbox=self.outbox,
            instance=INSTANCE,
            drain_timeout_s=30.0,
            observe=ObserveConfig(log_level="warning", log_format="json"),
            on_failure=self.failures.append,
        )
        self.engine = EngineThread(self.inbox, self.outbox)
        self.client = RawClient(self.frontend.endpoints[0])

    def wait_until_served(self):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self.client.send(Generate(request_id=os.urandom(16), input="text", max_tokens=1), b"x")
            message, _ = self.client.receive(60)
            if isinstance(message, Tokens):
                assert isinstance(self.client.receive()[0], Finished)
                return self
            assert isinstance(message, Failed)
            assert message.code == "starting"
            time.sleep(0.02)
        raise TimeoutError

    def stop(self):
        self.engine.stop()
        ended = self.frontend.stop(60)
        self.client.close()
        return ended


@pytest.fixture(params=["thread", "process"])
def mode(request):
    return request.param


@pytest.fixture
def start(tmp_path):
    running = []

    def begin(mode, **options):
        running.append(Running(tmp_path, mode, **options))
        return running[-1]

    yield begin
    for each in running:
        each.stop()


def eventually(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_everything_crosses_in_both_modes(start, mode):
    running = start(mode).wait_until_served()
    client = running.client
    reply, _ = client.ask(Hello())
    assert (reply.instance, reply.model) == (INSTANCE, "echo")
    text, finished = client.generate("hé".encode(), max_tokens=7, n=2, sampling=Sampling(logprobs=1, seed=2**64 - 1))
    assert text == "héhéh"
    assert finished.usage.completion_tokens == 14
    assert finished.seed == 2**64 - 1
    submit = [command for command in running.engine.engine.commands if isinstance(command, Submit)][-1]
    assert submit.sampling.seed == 2**64 - 1
    client.send(Pin(op_id=bytes(16), name="p", input="messages"), pack_body([{"role": "system", "content": "x" * 40}]))
    _, bodies = client.receive()
    assert unpack_body(bodies[0])["name"] == "p"
    pin = [command for command in running.engine.engine.commands if isinstance(command, PinPrefix)][-1]
    assert pin.recipe.messages == [{"role": "system", "content": "x" * 40}]
    _, bodies = client.ask(Stats(op_id=bytes(16)))
    assert unpack_body(bodies[0])["transport"]["requests_finished"] >= 2
    assert running.failures == []


def test_the_engines_end_ends_the_edge_after_its_last_word(start, mode):
    running = start(mode).wait_until_served()
    running.client.send(Generate(request_id=os.urandom(16), input="text", max_tokens=500, credit=1), b"abc")
    assert isinstance(running.client.receive()[0], Tokens)
    running.engine.stop()
    assert running.client.receive()[0].code == "draining"
    eventually(lambda: not running.frontend.is_alive())
    assert running.failures == []


def test_a_full_engine_inbox_is_overloaded(start, mode):
    running = start(mode, capacity=0)

    def code():
        return running.client.ask(Generate(request_id=os.urandom(16), input="text"), b"x")[0].code

    eventually(lambda: code() == "overloaded")


def test_an_endpoint_in_use_is_refused_in_both_modes(start, mode, tmp_path):
    start("thread")
    with pytest.raises(EndpointInUseError, match="another process listens here"):
        Running(tmp_path, mode)


def test_a_missing_tokenizer_is_a_failure_of_the_edge(start, mode, tmp_path):
    running = start(mode, text_source=str(tmp_path / "no-model"))
    eventually(lambda: running.failures)


def test_the_death_of_the_process_is_reported(start):
    running = start("process").wait_until_served()
    os.kill(running.frontend.pid, signal.SIGKILL)
    eventually(lambda: running.failures)
    assert "-9" in running.failures[0]
    assert not running.frontend.is_alive()


def test_a_result_that_cannot_be_encoded_fails_its_operation_alone(start, mode):
    running = start(mode).wait_until_served()
    handle = running.engine.engine.handle

    def answer(command):
        return [OpDone(command.op_id, {"bad": object()})] if isinstance(command, CheckpointNow) else handle(command)

    running.engine.engine.handle = answer
    failed, _ = running.client.ask(Checkpoint(op_id=bytes(16)))
    assert (failed.code, failed.op_id) == ("internal", bytes(16))
    assert running.client.generate()[0] == "abcab"
    _, bodies = running.client.ask(Stats(op_id=bytes(16)))
    assert unpack_body(bodies[0])["transport"]["internal_errors"] == 1
    assert running.failures == []


def test_tokens_that_cannot_be_encoded_fail_their_request_alone(start):
    running = start("process").wait_until_served()
    request_id = os.urandom(16)
    running.client.send(Generate(request_id=request_id, input="text", max_tokens=500, credit=1), b"abc")
    running.client.receive()
    running.outbox.put([TokensOut(request_id, 0, 1, object())])
    assert running.client.receive()[0].code == "internal"
    eventually(lambda: running.engine.engine.num_requests == 0)
    assert running.client.generate()[0] == "abcab"
    assert running.failures == []


def test_a_command_that_cannot_be_read_fails_alone(start):
    running = start("process").wait_until_served()
    client = running.client
    client.send(Generate(request_id=bytes(16), input="text", max_tokens=500, credit=1), b"abc")
    client.receive()
    broken = {"type": "Submit", "request_id": bytes(16), "token_ids": 5}
    (command,) = running.frontend._decode_each(msgspec.msgpack.encode([broken, Abort(b"other")]))
    assert command == Abort(b"other")
    assert client.receive()[0].code == "internal"


def test_a_command_that_cannot_be_encoded_fails_alone():
    told = []

    def instead_of(command, error):
        told.append(error)
        return []

    batch = _encode([Abort(b"a"), Abort(object()), Abort(b"b")], instead_of)
    assert msgspec.msgpack.decode(batch, type=list[Command]) == [Abort(b"a"), Abort(b"b")]
    assert [type(error) for error in told] == [TypeError]


def test_the_end_of_the_thread_beside_the_process_is_a_failure(start):
    running = start("process").wait_until_served()
    running.outbox.put([object()])
    eventually(lambda: running.failures)
    assert "thread beside the frontend process failed" in running.failures[0]
    eventually(lambda: not running.frontend.is_alive())
    running.stop()
    assert len(running.failures) == 1


def test_a_command_pump_that_dies_ends_the_process():
    class Broken:
        def wait(self, timeout_s):
            raise ZeroDivisionError

    class Alive:
        def is_alive(self):
            return True

    failures = []
    _send_commands(None, Broken(), None, Alive(), failures.append)
    assert "ZeroDivisionError" in failures[0]


def test_signals_of_the_terminal_are_not_for_the_process(start):
    running = start("process").wait_until_served()
    os.kill(running.frontend.pid, signal.SIGINT)
    os.kill(running.frontend.pid, signal.SIGTERM)
    assert running.client.generate()[0] == "abcab"


PARENT = """
import sys, time
from kvd.config import ObserveConfig, TransportConfig
from kvd.frontend import start_frontend
from kvd.transport.inproc import InprocInbox, InprocOutbox
frontend = start_frontend(TransportConfig(listen=(sys.argv[1],), frontend="process"), text_source="bytes", inbox=InprocInbox(8),
    outbox=InprocOutbox(), instance=b"x" * 16, drain_timeout_s=1.0, observe=ObserveConfig(), on_failure=print)
print(frontend.pid, flush=True)
time.sleep(60)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_process_ends_when_the_daemon_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", PARENT, f"ipc://{tmp_path}/s"], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
        eventually(lambda: not is_running(pid))
    assert not (tmp_path / "s").exists(), "it cleaned up behind itself"


def test_the_process_imports_neither_torch_nor_lmdb():
    code = (
        "import sys, kvd.frontend; from kvd.text.model import load_text_model; load_text_model('bytes');"
        "print([name for name in ('torch', 'lmdb', 'numpy', 'kvd.engine', 'kvd.executor', 'kvd.storage') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
