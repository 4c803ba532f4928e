"""All tests of the native kernels once more with the address sanitizer in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.full, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCES = ROOT / "kvd/executor/kernels/cpu"
PLUGIN = """
import importlib.util, sys
import kvd.executor.kernels.cpu as package
spec = importlib.util.spec_from_file_location("kvd.executor.kernels.cpu._cpu", {module!r})
package._cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package._cpu)
sys.modules["kvd.executor.kernels.cpu._cpu"] = package._cpu
"""


def library(name: str) -> str:
    """Where the compiler has a library of its run time."""
    return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ brings the sanitizer")
def test_kernels_stay_within_their_arrays(tmp_path: Path) -> None:
    build = tmp_path / "build"
    options = ["-DKVD_SANITIZE=address", f"-DPython_EXECUTABLE={sys.executable}", "-G", "Ninja"]
    subprocess.run(["cmake", "-S", SOURCES, "-B", build, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build, "--target", "_cpu", "-j2"], check=True, capture_output=True)
    (module,) = build.glob("_cpu.*.so")
    (tmp_path / "sanitized_kernels.py").write_text(PLUGIN.format(module=str(module)))
    environment = {
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so.6')}",  # exceptions of a library that is loaded later
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # the interpreter itself leaks by design
        "PYTHONPATH": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "sanitized_kernels", "-p", "no:cacheprovider", "-m", "not full", HERE]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    assert "passed" in done.stdout
    assert "AddressSanitizer" not in done.stdout
