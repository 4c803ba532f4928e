"""kvd demo: what is left behind, however it ends (tests/packaging runs the whole of it)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvd.cli import app
from kvd.cli.exits import Exit
from kvd.settings import model_store


class DemoError(Exception):
    pass


@pytest.fixture
def demo(monkeypatch, tmp_path):
    """The command with a stubbed run: ``demo.end`` is what happens in it."""
    stub = types.SimpleNamespace(end=None)

    class Demo:
        def __init__(self, root: Path, *_: object, **__: object) -> None:
            (root / "state").mkdir()

        def run(self):
            return stub.end()

    monkeypatch.setitem(sys.modules, "kvd.cli.demo_run", types.SimpleNamespace(Demo=Demo, DemoError=DemoError))
    monkeypatch.setattr(model_store, "resolve_model", lambda _: tmp_path / "model.gguf")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return stub


def raising(error: BaseException):
    def end():
        raise error

    return end


def returning(*, holds: bool):
    facts = {"fact": {"holds": holds, "figures": "1"}}
    result = {"rows": [], "ready_s": {}, "facts": facts, "prefix_tokens": 1, "restored_bytes": 1}
    return lambda: types.SimpleNamespace(holds=holds, as_dict=lambda: result)


@pytest.mark.parametrize(
    ("end", "flags", "code", "is_kept"),
    [
        (returning(holds=True), [], Exit.OK, False),
        (returning(holds=True), ["--keep"], Exit.OK, True),
        (returning(holds=False), [], Exit.FAILED, True),
        (raising(DemoError("the daemon ended with exit code 78")), [], Exit.SOFTWARE, True),
        (raising(KeyboardInterrupt()), [], Exit.INTERRUPTED, False),
        (raising(KeyboardInterrupt()), ["--keep"], Exit.INTERRUPTED, True),
    ],
)
def test_what_is_kept(demo, tmp_path, capsys, end, flags, code, is_kept):
    demo.end = end
    assert app.main(["demo", *flags]) == code
    left = [path for path in tmp_path.iterdir() if path.name.startswith("kvd-demo-")]
    assert len(left) == is_kept
    assert (f"kept: {left[0] if left else ''}" in capsys.readouterr().err) == is_kept


INTERRUPTED = """
import sys
from pathlib import Path
from kvd.cli.demo_run import Demo
demo = Demo(Path(sys.argv[1]), ["--executor", "fake", "--kv-memory", "1MiB"], print, None)
with demo._daemon(Path(sys.argv[1], "state"), "start") as (daemon, client):
    print(daemon.pid, flush=True)
    client.generate("on and on", max_tokens=100000)
"""


@pytest.mark.e2e
def test_ctrl_c_ends_the_demos_daemon(tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    environ = {**os.environ, "KVD_MAX_MODEL_LEN": "0", "KVD_FAKE_STEP_MS": "20", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as demo:
        daemon_pid = int(demo.stdout.readline())
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(daemon_pid, 0)
