"""What the process learns of the native kernels: also where they are not there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvd.executor.host_cores import compute_threads
from kvd.executor.kernels.cpu import native

ROOT = Path(__file__).parents[3]
SHOW = "from kvd.executor.kernels.cpu import native; print(native.status().isa, native.status().reason, sep='|', end='')"
ABSENT = "import sys; sys.modules['kvd.executor.kernels.cpu._cpu'] = None; "
BROKEN = (
    "import sys, importlib.machinery as m; m.ExtensionFileLoader.create_module = lambda *_: (_ for _ in ()).throw(ImportError('bad')); "
)


def show(prelude: str = "", isa: str = "") -> list[str]:
    command = [sys.executable, "-c", prelude + SHOW]
    environment = os.environ | {native.ISA_VARIABLE: isa, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("|", 1)


def test_absent_kernels_are_explained() -> None:
    assert show(ABSENT)[0] == "None"
    assert "no C++ compiler" in show(ABSENT)[1]


@pytest.mark.skipif(native.status().isa is None, reason="no native kernels here")
def test_the_environment_chooses_the_instruction_set() -> None:
    assert show() == [native.status().available_isas[-1], ""]
    for isa in native.status().available_isas:
        assert show(isa=isa) == [isa, ""]
    assert show(isa="sse") == ["None", f"KVD_CPU_ISA=sse: no such instruction set: sse; have {', '.join(native.status().available_isas)}"]


@pytest.mark.skipif(native.status().isa is None, reason="no native kernels here")
def test_a_module_that_does_not_load_is_no_end() -> None:
    assert show(BROKEN) == ["None", "they don't load: bad"]


@pytest.mark.skipif(native.status().isa is None, reason="no native kernels here")
def test_there_is_one_pool() -> None:
    pool = native.pool()
    assert native.pool() is pool
    assert native.pool(pool.num_threads) is pool
    other = native.pool(pool.num_threads + 1)
    assert native.pool() is other
    assert other.num_threads == pool.num_threads + 1
    assert native.pool(compute_threads(0)).num_threads == compute_threads(0)


def test_threads_that_ask_at_once_get_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are packed on a thread of their own while the executor opens."""

    def slowly(num_threads: int) -> object:
        time.sleep(0.01)
        return object()

    monkeypatch.setattr(native, "module", lambda: SimpleNamespace(Pool=slowly))
    monkeypatch.setattr(native, "_pools", {})
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(lambda _: native.pool(3), range(4)))) == 1
