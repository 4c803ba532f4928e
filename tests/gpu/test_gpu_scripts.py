"""The scripts for a machine with a GPU, as far as they go without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.triton, pytest.mark.full]

HERE = Path(__file__).parent


def run(script, *arguments, interpret):
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    return subprocess.run(
        [sys.executable, HERE / script, *arguments], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def test_the_check_runs_under_the_interpreter(tmp_path):
    found = run("gpu_check.py", "--tiny", "--json", tmp_path / "found.json", interpret=True)
    assert found.returncode == 0, found.stdout + found.stderr
    entries = json.loads((tmp_path / "found.json").read_text())
    names = [entry["name"] for entry in entries]
    assert "greedy tokens of the two runners" in names
    assert "rehydration, host memory to pool" in names
    assert entries[-1] == {"name": "end", "failed": 0}
    assert not any(entry.get("verdict") not in (None, "equal") for entry in entries)


@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(capability):
    found = run("compile_kernels.py", capability, interpret=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"every kernel compiles for {capability}" in found.stdout
