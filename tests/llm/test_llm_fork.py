"""A process that was forked from one with an open engine may have an engine of its own, which computes with as many threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.executor.kernels.cpu import native

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store, pytest.mark.torch]

PROGRAM = """
import os, sys, threading, time
import kvd

SETTINGS = {"model": sys.argv[1], "kv_memory": "4MiB", "threads": 2}

def facts(engine):
    threads = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
    answer = engine.generate("the tour begins at ten", max_tokens=6, temperature=0.0, progress=False)[0]
    return answer.token_ids, sum(name == "kvd-cpu-1\\n" for name in threads)

def fork(name, before=lambda: None):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            before()
            for _ in range(2):  # one after the other
                with kvd.LLM(**SETTINGS) as own:
                    got = facts(own)
                    code = 0 if got == wanted else 2
                if code:
                    break
        except BaseException as error:
            got = error
        if code:
            print(name, repr(got), wanted, flush=True)
        os._exit(code)
    until_s = time.monotonic() + 60
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > until_s:
            os.kill(pid, 9)
        time.sleep(0.01)
    print(name, os.waitstatus_to_exitcode(ended[1]), flush=True)

engine = kvd.LLM(**SETTINGS)
wanted = facts(engine)
assert wanted[1] == 1
fork("open")
fork("closed in the child", engine.close)
is_over = threading.Event()

def work():
    while not is_over.is_set():
        engine.generate([f"every visitor {number}" for number in range(6)], max_tokens=30, ignore_eos=True, progress=False)

busy = threading.Thread(target=work)
busy.start()
for _ in range(4):
    fork("busy")
is_over.set()
busy.join()
assert facts(engine) == wanted
engine.close()
fork("closed")
"""


@pytest.mark.skipif(native.status().isa is None, reason="kvd was installed without its native kernels")
def test_a_child_makes_an_engine_of_its_own(tmp_path: Path) -> None:
    import tiny_models

    model = tiny_models.make_model(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    told = ["open 0", "closed in the child 0", *["busy 0"] * 4, "closed 0"]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, told, "")
