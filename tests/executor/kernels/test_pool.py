"""The pool of threads, by a program of its own: counted pieces, busy neighbours, a fork, failures, and (full) the thread sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "kvd/executor/kernels/cpu"
COMPILER = shutil.which("g++") or shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def run_stress(folder: Path, num_regions: int, *flags: str) -> None:
    program = folder / "stress"
    sources = [Path(__file__).with_name("pool_stress.cpp"), KERNELS / "pool.cpp"]
    subprocess.run(
        [COMPILER, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{KERNELS}", *flags, *sources, "-o", program], check=True
    )
    alone = os.environ | {"LD_PRELOAD": ""}  # without what the tests themselves run under
    done = subprocess.run([program, str(num_regions)], env=alone, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_pieces_are_done_once_whoever_takes_the_cores(tmp_path: Path) -> None:
    run_stress(tmp_path, 1000, "-O2")


@pytest.mark.full
def test_thread_sanitizer_finds_nothing(tmp_path: Path) -> None:
    run_stress(tmp_path, 20_000, "-O1", "-g", "-fsanitize=thread")
