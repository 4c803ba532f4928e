"""The tests of all native code once more with the address sanitizer in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.full, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCES = ROOT / "kvd/executor/kernels/cpu"
TOOLS = f"{os.environ.get('PATH', os.defpath)}:{Path(sys.executable).parent}"
TESTS = (
    "tests/executor/kernels",  # products, attention, the pool
    "tests/executor/test_executor_elementwise.py",
    "tests/executor/test_executor_adapters.py",
    "tests/executor/test_executor_native.py",  # the decoder
    "tests/executor/test_executor_quantised.py",
    "tests/executor/test_kv_dtypes.py",
    "tests/executor/test_native_kv_pool.py",
    "tests/models/test_native_weights.py",  # rows of weight files
)
PLUGIN = """
import importlib.util, sys
import kvd.executor.kernels.cpu as package
spec = importlib.util.spec_from_file_location("kvd.executor.kernels.cpu._cpu", {module!r})
package._cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package._cpu)
sys.modules["kvd.executor.kernels.cpu._cpu"] = package._cpu
from kvd.executor.kernels.cpu import native
assert native.module() is package._cpu
"""
BEYOND = """
import sanitized_kernels
import numpy as np
from kvd.executor.kernels.cpu import native
stored = np.zeros((64, 300), np.float32)
native.module().load_rows(native.module().Matrix("f32", 64, 301), native.pool(1), 0, 64, stored.ctypes.data, "F32")
"""
"""Reads 256 bytes that are not there."""


def library(name: str) -> str:
    """Where the compiler has a library of its run time."""
    return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which ``sanitized_kernels`` can be imported, and takes the place of the kernels that are installed."""
    folder = tmp_path_factory.mktemp("sanitized")
    cmake = shutil.which("cmake", path=TOOLS)
    assert cmake is not None, "make setup brings cmake"
    options = ["-DKVD_SANITIZE=address", "-DCMAKE_CXX_COMPILER=g++", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run([cmake, "-S", SOURCES, "-B", folder / "build", *options], check=True, capture_output=True)
    subprocess.run([cmake, "--build", folder / "build", "--target", "_cpu", "-j2"], check=True, capture_output=True)
    (module,) = (folder / "build").glob("_cpu.*.so")
    (folder / "sanitized_kernels.py").write_text(PLUGIN.format(module=str(module)))
    return os.environ | {
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so.6')}",  # exceptions of a library that is loaded later
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # the interpreter itself leaks by design
        "PYTHONPATH": f"{folder}:{ROOT}",
        "OMP_NUM_THREADS": "1",
    }


def run(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ brings the sanitizer")
def test_kernels_stay_within_their_arrays(environment: dict[str, str]) -> None:
    status, output = run(environment, "-c", BEYOND)
    assert status != 0
    assert "AddressSanitizer: heap-buffer-overflow" in output, output[-20_000:]
    options = ["-q", "-p", "sanitized_kernels", "-p", "no:cacheprovider", "-m", "not full and not model"]
    status, output = run(environment, "-m", "pytest", *options, *TESTS)
    assert status == 0, output[-20_000:]
    assert "passed" in output
    assert "AddressSanitizer" not in output
