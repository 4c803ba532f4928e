"""The engine inside of an application: what goes in, what comes out, and how it ends."""

from __future__ import annotations

import dataclasses
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path

import pytest
from kvd_client.errors import BadRequest, ClientClosed, PromptTooLong, Timeout

import kvd
from kvd.config import ConfigError
from kvd.llm import EngineStoppedError
from kvd.observe import progress
from kvd.settings.loader import from_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

STEM = "a system prompt of some length, so that it fills a few blocks of sixteen; "


@pytest.fixture(scope="module")
def llm():
    with kvd.LLM(executor="fake", kv_memory="8MiB", max_running=8) as engine:
        yield engine


def test_answers_come_in_the_order_of_the_prompts(llm):
    prompts = [f"{STEM}{number}" for number in range(150)]
    alone = [llm.generate(prompt, max_tokens=5, temperature=0.0, cache_salt="alone")[0].text for prompt in prompts[:20]]
    together = llm.generate(prompts, max_tokens=5, temperature=0.0, progress=False)
    assert [answer.text for answer in together[:20]] == alone
    assert len({answer.text for answer in together}) > 100
    assert sum(answer.usage.cached_tokens for answer in together) > 100 * 64
    assert llm.client.status()["requests"]["running"] == 0


def test_prompts_of_every_kind(llm):
    chat = [{"role": "user", "content": "hello"}]
    answers = llm.generate(["hello", [104, 101, 108, 108, 111], chat], max_tokens=4, temperature=0.0)
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[2].usage.prompt_tokens > 5
    assert [each.token_ids for each in llm.chat(chat, max_tokens=4, temperature=0.0)] == [answers[2].token_ids]
    assert len(llm.chat([chat, chat], max_tokens=1)) == 2
    assert len(llm.generate([104, 101], max_tokens=1)) == 1
    assert llm.generate([]) == []


def test_options_for_all_and_for_each(llm):
    answers = llm.generate(["a", "b"], [{"max_tokens": 2}, {"max_tokens": 3, "n": 2}], seed=7, ignore_eos=True)
    assert [len(answer.token_ids) for answer in answers] == [2, 3]
    assert [len(answer.choices) for answer in answers] == [1, 2]
    assert {answer.seed for answer in answers} == {7}
    assert llm.generate("a", {"max_tokens": 2}, seed=7, ignore_eos=True)[0].token_ids == answers[0].token_ids
    with pytest.raises(ValueError, match="2 prompts and 1 mappings"):
        llm.generate(["a", "b"], [{}])
    with pytest.raises(TypeError, match="unknown option 'max_token'"):
        llm.generate("a", max_token=2)


def test_prompts_may_come_one_by_one(llm):
    assert [answer.token_ids for answer in llm.generate((text for text in ("a", "b")), max_tokens=2, temperature=0)] == [
        answer.token_ids for answer in llm.generate(["a", "b"], max_tokens=2, temperature=0)
    ]


class Given:
    """Iterable, and no more than that."""

    def __iter__(self):
        return iter(["a", [98], [{"role": "user", "content": "c"}]])


def test_prompts_may_be_in_anything_that_can_be_gone_through(llm):
    wanted = [answer.token_ids for answer in llm.generate(list(Given()), max_tokens=2, temperature=0)]
    prompts = dict(enumerate(Given()))
    for some in (Given(), prompts.values(), deque(Given()), tuple(Given())):
        assert [answer.token_ids for answer in llm.generate(some, max_tokens=2, temperature=0)] == wanted
    assert {answer.token_ids for answer in llm.generate({"a", "b"}, max_tokens=2, temperature=0)} == {
        answer.token_ids for answer in llm.generate(["a", "b"], max_tokens=2, temperature=0)
    }
    for some in (prompts.keys(), {97, 98}, {"a": "b"}):
        with pytest.raises(BadRequest):
            llm.generate(some, max_tokens=2)
    assert llm.generate({}.values()) == llm.generate(set()) == llm.generate(()) == []


@pytest.mark.parametrize("value", ["hi", ["hi"], [3], [[3, 4]], [[{"role": "user", "content": "hi"}], "hi"], [[]]])
def test_chat_takes_conversations_alone(llm, value):
    with pytest.raises(TypeError, match="a conversation is a list of messages"):
        llm.chat(value)


def test_what_is_wrong_with_a_prompt_is_said_and_harms_nobody(llm):
    with pytest.raises(BadRequest, match="max_tokens") as refused:
        llm.generate(["a", "b"], [{}, {"max_tokens": -1}], max_tokens=3)
    assert refused.value.__notes__ == ["of prompts[1], of 2"]
    with pytest.raises(PromptTooLong):
        llm.generate("x" * 20000)
    with pytest.raises(BadRequest, match="int is not a sequence of token ids"):
        llm.generate(["a", 5])
    with pytest.raises(Timeout):
        llm.generate(["a"] * 5, timeout_s=0.0)
    assert llm.generate("a", max_tokens=1)[0].usage.completion_tokens == 1
    assert llm.client.status()["blocks"]["used"] == 0


def test_more_than_may_wait_is_handed_over_bit_by_bit():
    with kvd.LLM(executor="fake", kv_memory="1MiB", max_running=2, max_waiting=1, max_text_jobs=2, max_requests_per_client=3) as small:
        assert len(small.generate([f"{number}" for number in range(40)], max_tokens=3, progress=False)) == 40


def test_a_prompt_that_the_pool_is_too_small_for_says_that_it_is_the_pool():
    with kvd.LLM(executor="fake", kv_memory="16KiB", max_running=2, max_choices=4) as small:
        longest = small.client.hello().limits.max_model_len
        assert longest < 8192
        with pytest.raises(
            PromptTooLong, match=rf"exceeds? {longest}, which is what the KV pool holds \(the model takes 8192\): give .* more kv_memory"
        ):
            small.generate("x" * longest)
        with pytest.raises(PromptTooLong, match="which is what the KV pool holds"):
            small.generate("x", max_tokens=longest)
        for width in (0, 3):
            with pytest.raises(BadRequest, match=f"beam has the width {width}; it must be from 1 to 2"):
                small.generate("x", beam_width=width)


def test_the_client_does_the_rest(llm):
    client = llm.client
    pinned = client.pin("rules", STEM)
    assert pinned.details["tokens"] == len(STEM) // 16 * 16
    with client.generate(STEM + "x", stream=True, max_tokens=6, ignore_eos=True) as stream:
        assert sum(len(chunk.token_ids) for chunk in stream) == 6
    assert stream.completion.usage.cached_tokens >= 64
    assert client.tokenize("ab") == (97, 98)
    client.unpin("rules")


def test_threads_share_it(llm):
    answers = {}

    def ask(number):
        answers[number] = llm.generate([f"{STEM}{number}.{i}" for i in range(10)], max_tokens=3, temperature=0.0, progress=False)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = llm.generate(f"{STEM}3.9", max_tokens=3, temperature=0.0)
    assert answers[3][9].token_ids == again[0].token_ids


def test_a_bar_on_a_terminal_and_nothing_elsewhere(llm, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    llm.generate(["a", "b"], max_tokens=1)
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    llm.generate(["a", "b"], max_tokens=1, progress=False)
    assert terminal.getvalue() == ""
    llm.generate(["a", "b"], max_tokens=1)
    assert "generating" in terminal.getvalue()
    assert "100 %" in terminal.getvalue()


def test_control_c_ends_the_batch_and_not_the_engine(llm):
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([f"{STEM}{number}" for number in range(1000)], max_tokens=300, ignore_eos=True)
    timer.join()
    assert llm.generate("a", max_tokens=1)[0].usage.completion_tokens == 1
    assert llm.client.status()["blocks"]["used"] == 0


def test_one_after_the_other_begins_warm_from_its_state(tmp_path):
    for is_first in (True, False):
        with kvd.LLM(executor="fake", kv_memory="4MiB", state_dir=tmp_path / "state", write_policy="through") as warm:
            answer = warm.generate(STEM, max_tokens=4, temperature=0.0)[0]
            assert answer.usage.restored_tokens == (0 if is_first else 64)
            with pytest.raises(EngineStoppedError, match="in use by process"):
                kvd.LLM(executor="fake", state_dir=tmp_path / "state")


def test_two_at_once_and_nothing_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = threading.active_count()
    with kvd.LLM(executor="fake", kv_memory="1MiB") as one, kvd.LLM(executor="fake", kv_memory="1MiB") as other:
        assert one.generate("a", max_tokens=2, temperature=0.0)[0].text == other.generate("a", max_tokens=2, temperature=0.0)[0].text
    assert list(tmp_path.iterdir()) == []
    gc.collect()
    until_s = time.monotonic() + 60
    while threading.active_count() > before:  # nobody waits for those that tokenise
        assert time.monotonic() < until_s, threading.enumerate()
        time.sleep(0.01)


def test_what_is_closed_says_so():
    engine = kvd.LLM(executor="fake", kv_memory="1MiB")
    daemon = weakref.ref(engine._engine._daemon)
    stream = engine.client.generate("a", stream=True, max_tokens=100000, window_tokens=1)
    engine.close()
    engine.close()
    with pytest.raises(ClientClosed):
        list(stream)
    with pytest.raises(EngineStoppedError, match="closed"):
        engine.generate("a")
    with pytest.raises(ClientClosed):
        engine.client.status()
    gc.collect()
    assert daemon() is None, "the pool is kept"


@pytest.mark.parametrize("is_deaf", [False, True])
def test_what_loads_has_ended_when_a_start_was_interrupted(monkeypatch, is_deaf):
    """A thread left behind would compute beside the next engine, and abort the interpreter's way out."""
    daemons, begun, steps = [], threading.Event(), []

    def load(progress):
        begun.set()
        for done in range(1 if is_deaf else 1000):
            progress(done, 1000)
            steps.append(done)
            time.sleep(1.0 if is_deaf else 0.1)

    class Loads(kvd.llm.Daemon):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            daemons.append(self)

        def _open_engine(self, *args):
            return dataclasses.replace(super()._open_engine(*args), load=load)

    def interrupt():
        begun.wait(30)
        time.sleep(0.2)  # until the main thread only waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(kvd.llm, "Daemon", Loads)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        kvd.LLM(executor="fake", kv_memory="1MiB")
    interrupter.join()
    assert not daemons[0].is_loading
    assert 1 <= len(steps) < 500, "it was not waited for to its end"


def test_what_a_thread_had_begun_before_it_ended_is_seen_to_run():
    daemon = kvd.llm.Daemon(from_arguments({"executor": "fake"}))

    class Thread:
        def __init__(self, *begun):
            self._begun = begun

        @property
        def is_running(self):
            daemon._threads.extend(self._begun)  # and ends, just as it is asked
            return not self._begun

    daemon._threads.append(Thread(Thread()))
    assert daemon.is_loading


def test_an_interrupted_close_gives_everything_back_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = kvd.LLM(executor="fake", kv_memory="1MiB")
    assert len(list(tmp_path.iterdir())) == 1
    assert kvd.llm._native_engines.acquire(blocking=False)  # as one that computes has it
    engine._engine._has_kernels = True

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine._is_over, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    engine.close()  # waits again
    assert list(tmp_path.iterdir()) == []
    assert kvd.llm._native_engines.acquire(blocking=False)
    kvd.llm._native_engines.release()


def test_a_start_that_fails_at_once_gives_everything_back(tmp_path, monkeypatch):
    class Isa:
        isa = "any"

    def fails(*_, **__):
        raise MemoryError("here")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(kvd.llm, "Daemon", fails)
    monkeypatch.setattr(kvd.llm, "resolve_model", lambda model: model)
    monkeypatch.setattr(kvd.llm.native, "status", Isa)
    for _ in range(2):
        with pytest.raises(MemoryError, match="here"):
            kvd.LLM("any")
    assert list(tmp_path.iterdir()) == []


def test_settings_are_checked(tmp_path):
    for wrong, error, message in (
        ({"max_runing": 3}, TypeError, "did you mean max_running"),
        ({"listen": ("ipc:///tmp/x",)}, TypeError, "sockets"),
        ({"max_running": 0}, ConfigError, "argument max_running"),
        ({"max_running": "three"}, ConfigError, "max_running"),
        ({"max_running": 2.5}, ConfigError, "max_running"),
        ({"persist": True}, ConfigError, "state_dir"),
        ({"executor": "torch", "model": str(tmp_path / "none.gguf")}, ConfigError, "does not exist"),
    ):
        with pytest.raises(error, match=message):
            kvd.LLM(**{"executor": "fake", **wrong})
    with pytest.raises(AttributeError, match="LMM"):
        _ = kvd.LMM


def test_the_environment_has_no_say(monkeypatch):
    monkeypatch.setenv("KVD_MAX_RUNNING", "nonsense")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    with kvd.LLM(executor="fake", kv_memory="1MiB") as engine:
        assert engine.generate("a", max_tokens=1)


PROGRAM = """
import kvd
engine = kvd.LLM(executor="fake", kv_memory="1MiB")
print(engine.generate("a", max_tokens=3)[0].usage.completion_tokens, flush=True)
running = engine.client.generate("a", stream=True, max_tokens=5000)
"""


def test_a_program_that_closes_nothing_just_ends():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


FORKED = """
import os, sys, tempfile
import kvd
engine = kvd.LLM(executor="fake", kv_memory="1MiB")
pid = os.fork()
if not pid:
    try:
        engine.generate("a")
    except kvd.llm.EngineStoppedError as error:
        print(error, flush=True)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(os.listdir(tempfile.gettempdir())))
print(engine.generate("a", max_tokens=3)[0].usage.completion_tokens)
"""


def test_a_fork_leaves_everything_to_its_parent(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "it belongs to the process that made it\n0 1\n3\n", "")
    assert list(tmp_path.iterdir()) == []


EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "embedded.py"


def test_the_example_runs(tmp_path):
    environment = {**os.environ, "KVD_EXAMPLE_EXECUTOR": "fake"}
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("?")[0] for line in done.stdout.splitlines()] == [
        "When does it open",
        "When does it close",
        "On which day is it closed",
    ]
