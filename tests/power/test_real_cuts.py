"""Real power cuts: a daemon on an ext4 file system that is shut down under it, at any moment and as a client reads its pin's acknowledgement."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from power_harness import HERE, scratch

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

# In namespaces of its own: whatever becomes of the test, its processes, mounts and loop devices go with it.
NAMESPACE = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc")
_PROBE = "truncate -s 16M {0}/probe && mkfs.ext4 -q -F {0}/probe && mkdir {0}/mounted && mount -o loop {0}/probe {0}/mounted"


@functools.cache
def why_not(folder: Path) -> str:
    """Why no file system can be mounted here; empty if one can."""
    if missing := [tool for tool in ("unshare", "mkfs.ext4", "mount") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is not here"
    try:
        done = subprocess.run([*NAMESPACE, "sh", "-ec", _PROBE.format(folder)], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "mounting takes for ever"
    return done.stderr.strip() if done.returncode else ""


@pytest.fixture
def folder(tmp_path):
    place = scratch(tmp_path)
    if reason := why_not(place):
        shutil.rmtree(place)
        pytest.skip(f"real power cuts need root, ext4 and a loop device: {reason}")
    yield place
    shutil.rmtree(place)


def cut(folder: Path, seed: int, moment: str) -> None:
    place = folder / f"{moment}.{seed}"
    place.mkdir()
    command = [*NAMESPACE, sys.executable, str(HERE / "real_cut.py"), str(place), str(seed), moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong"] == [], f"seed {seed}, {moment}: {report}"
    print(f"real power cut, {moment} moment, seed {seed}: {report['acknowledged']} acknowledged before, all kept")
    shutil.rmtree(place)


@pytest.mark.parametrize("moment", ["instant", "any"])
def test_a_real_cut_keeps_every_promise(folder, moment):
    cut(folder, 1, moment)


@pytest.mark.full
@pytest.mark.parametrize("moment", ["instant", "any"])
def test_ten_real_cuts_keep_every_promise(folder, moment):
    for seed in range(10, 20):
        cut(folder, seed, moment)
