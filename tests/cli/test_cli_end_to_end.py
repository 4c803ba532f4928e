"""A user's session with real processes: serve, ask, pin, kill, ask again, drain, check."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from held_port import HeldPort

from kvd.cli.exits import Exit

pytestmark = pytest.mark.e2e

SYSTEM = "You are the assistant of a small shop that sells tea and answers in short sentences."


class Shop:
    """A state directory, an endpoint, and the commands against them."""

    def __init__(self, root: Path) -> None:
        self.state_dir = root / "state"
        self.endpoint = f"ipc://{root}/kvd.sock"
        self._log = (root / "log").open("w")
        self._daemons: list[subprocess.Popen] = []
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith("KVD_")} | {
            "KVD_CONNECT": self.endpoint,
            "KVD_STATE_DIR": str(self.state_dir),
            "KVD_LISTEN": self.endpoint,
            "KVD_EXECUTOR": "fake",
            "KVD_KV_MEMORY": "1MiB",
            "OMP_NUM_THREADS": "1",
        }

    def serve(self) -> subprocess.Popen:
        daemon = subprocess.Popen([sys.executable, "-m", "kvd", "serve"], env=self.environ, stdout=self._log, stderr=self._log)
        self._daemons.append(daemon)
        return daemon

    def run(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "kvd", *arguments]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout

    def ask(self, *arguments: str) -> dict:
        return json.loads(self.run(*arguments, "--json"))

    def close(self) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        self._log.close()


@pytest.fixture
def shop(tmp_path) -> Iterator[Shop]:
    opened = Shop(tmp_path)
    yield opened
    opened.close()


def test_a_session_through_a_kill(shop):
    question = ("generate", "--prompt", "What is oolong?", "--system", SYSTEM, "--max-tokens", "16", "--temperature", "0")
    daemon = shop.serve()
    assert shop.ask("ping", "--wait")["state"] == "ready"
    pinned = shop.ask("pin", "shop", "--system", SYSTEM)
    assert pinned["durable"] == "recipe+bytes"
    assert pinned["tokens"] >= 16
    hit = shop.ask(*question)
    assert hit["usage"]["cached_tokens"] >= pinned["tokens"]
    assert hit["usage"]["restored_tokens"] == 0
    assert [entry["name"] for entry in shop.ask("prefixes")["pins"]] == ["shop"]
    count = shop.ask("tokenize", "--prompt", "What is oolong?", "--system", SYSTEM)["count"]
    assert count == hit["usage"]["prompt_tokens"]

    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    daemon = shop.serve()
    restored = shop.ask(*question, "--wait")
    assert restored["token_ids"] == hit["token_ids"]
    assert restored["usage"]["restored_tokens"] >= pinned["tokens"]
    status = shop.ask("status")
    assert status["state"] == "ready"
    assert status["rehydration"]["tokens"] >= pinned["tokens"]

    assert shop.ask("drain") == {"draining": True}
    assert daemon.wait(timeout=60) == Exit.OK
    report = shop.ask("store", "check")
    assert report["ok"] is True
    assert report["recipes"] == 1
    kinds = {json.loads(line)["kind"] for line in shop.run("store", "dump").splitlines()}
    assert {"recipe", "node", "block"} <= kinds


def test_several_choices_share_their_prompt(shop):
    shop.serve()
    shop.run("ping", "--wait")
    answer = shop.ask("generate", "--prompt", "tea " * 20, "--n", "3", "--seed", "5", "--max-tokens", "4", "--ignore-eos")
    assert len(answer["choices"]) == 3
    assert answer["usage"]["completion_tokens"] == 12
    assert all(len(choice["token_ids"]) == 4 and choice["finish_reason"] == "length" for choice in answer["choices"])


def test_what_a_script_meets(shop):
    shop.run("generate", "--prompt", "x", "--timeout", "1", code=Exit.UNAVAILABLE)
    shop.serve()
    shop.run("ping", "--wait")
    shop.run("unpin", "nobody", code=Exit.NO_INPUT)
    shop.run("pin", "short", "--system", "", "--prompt-file", "/dev/null", code=Exit.USAGE)
    shop.run("pin", "short", "--prompt-file", "/dev/null", code=Exit.DATA)
    shop.run("generate", "--prompt", "x" * 20000, code=Exit.DATA)
    second = shop.serve()
    assert second.wait(timeout=60) == Exit.TEMPORARY, "one daemon per state directory"
    shop.run("store", "check", "--repair", code=Exit.TEMPORARY)
    assert shop.ask("store", "check")["in_use"] is True


def test_the_manuals_way_to_curve_works_as_it_stands(shop, tmp_path):
    manual = (Path(__file__).parents[2] / "docs" / "operations.md").read_text("utf-8")
    (block,) = re.findall(r"<!-- curve -->\n(.*?)<!-- /curve -->", manual, re.DOTALL)
    port = HeldPort()
    script = "set -e\ntrap 'kill $!' EXIT\n" + textwrap.dedent(block).replace("7411", str(port.number)).replace("0.0.0.0", "127.0.0.1")
    environ = {key: value for key, value in shop.environ.items() if key not in {"KVD_LISTEN", "KVD_CONNECT"}}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    keys = tmp_path / "keys"
    keys.mkdir()
    with port:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=keys,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0
    assert f"tcp://127.0.0.1:{port.number} is ready" in done.stdout
    assert {path.stat().st_mode & 0o077 for path in keys.glob("*.key_secret")} == {0}


@pytest.mark.parametrize("flags", [[], ["--stream"]], ids=["whole", "stream"])
def test_an_answer_that_a_drain_cuts_short(shop, flags):
    shop.environ["KVD_FAKE_STEP_MS"] = "20"
    daemon = shop.serve()
    shop.run("ping", "--wait")
    command = [sys.executable, "-m", "kvd", "generate", "--prompt", "x", "--ignore-eos", "--json", *flags]
    with subprocess.Popen(command, env=shop.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        while not shop.ask("status")["requests"]["running"]:
            pass
        shop.run("drain", "--drain-timeout", "0")
        out, err = asking.communicate(timeout=60)
    assert asking.returncode == Exit.TEMPORARY, err
    assert json.loads(out)["finish_reason"] == "aborted"
    assert "drain" in err.splitlines()[-1]
    assert daemon.wait(timeout=60) == Exit.OK


def test_a_second_signal_ends_the_daemon_at_once(shop):
    shop.environ["KVD_FAKE_STEP_MS"] = "20"
    daemon = shop.serve()
    shop.run("ping", "--wait")
    command = [sys.executable, "-m", "kvd", "generate", "--prompt", "x", "--ignore-eos"]
    with subprocess.Popen(command, env=shop.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as asking:
        while not shop.ask("status")["requests"]["running"]:
            pass
        daemon.send_signal(signal.SIGTERM)
        while shop.ask("status")["state"] != "draining":
            pass
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=60) == Exit.TERMINATED
        asking.kill()
