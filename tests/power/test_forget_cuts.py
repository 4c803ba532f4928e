"""What was forgotten stays forgotten through a power cut, and what is others' comes back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from power_harness import HERE, compile_recorder, recording, scratch

pytestmark = pytest.mark.store


@pytest.fixture
def folder(tmp_path):
    place = scratch(tmp_path)
    yield place
    shutil.rmtree(place)


def check(folder, fraction: float) -> int:
    """The number of states that were checked, all of them right."""
    script, disk, log, place = HERE / "recorded_forget.py", folder / "disk", folder / "io.log", folder / "check"
    disk.mkdir()
    place.mkdir()
    environ = os.environ | recording(compile_recorder(folder), disk, log)
    subprocess.run([sys.executable, str(script), "live", str(disk / "state"), str(log)], check=True, env=environ, timeout=120)
    command = [sys.executable, str(script), "check", str(log), "0", str(fraction), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{(place / 'now').read_text()}: {done.stderr}"
    report = json.loads(done.stdout)
    assert report["found"] == [], f"{len(report['found'])} of {report['num_states']}; the first: {json.dumps(report['found'][0], indent=1)}"
    print(f"{report['num_states']} of {report['num_states']} states after a power cut around a forget, seed 0")
    return report["num_states"]


def test_a_power_cut_brings_nothing_back_that_was_forgotten(folder):
    assert check(folder, 0.03) > 100


@pytest.mark.full
def test_no_power_cut_brings_anything_back_that_was_forgotten(folder):
    assert check(folder, 1.0) > 2000
