"""What the power-loss tests share: the compiled recorder, recorded lives, and the checks of what a cut may leave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")


def scratch(tmp_path: Path) -> Path:
    """A folder for what is written often and read once; in memory where there is such a place."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        return tmp_path
    return Path(tempfile.mkdtemp(prefix="kvd-power.", dir=SHARED_MEMORY))


def compile_recorder(folder: Path) -> Path:
    """``record_io.c`` as a shared library; skips the test where there is no C compiler or no preloading."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("recording needs Linux and a C compiler (cc)")
    library = folder / "record_io.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(library), str(HERE / "record_io.c"), "-lpthread"], check=True
    )
    return library


def recording(library: Path, directory: Path, log: Path) -> dict[str, str]:
    """The environment in which a process records what it writes below ``directory``."""
    log.touch()
    return {"LD_PRELOAD": str(library), "KVD_RECORD_DIR": str(directory.resolve()), "KVD_RECORD_LOG": str(log)}


def record_life(folder: Path, name: str) -> Path:
    """Run the life ``name`` of ``recorded_life.py`` under the recorder; its log."""
    disk, log = folder / "disk", folder / "io.log"
    disk.mkdir()
    environ = os.environ | recording(compile_recorder(folder), disk, log)
    subprocess.run(
        [sys.executable, str(HERE / "recorded_life.py"), name, str(disk / "state"), str(log)], check=True, env=environ, timeout=120
    )
    return log


def check_states(log: Path, folder: Path, *, seed: int, fraction: float, num_processes: int = 2) -> int:
    """Start the storage room on what a cut may leave, in ``num_processes`` processes; the number of states, all of them right."""
    checks = []
    for share in range(num_processes):
        place = folder / f"check.{share}"
        place.mkdir()
        command = [
            sys.executable,
            str(HERE / "check_states.py"),
            str(log),
            str(seed),
            str(share),
            str(num_processes),
            str(fraction),
            str(place),
        ]
        checks.append((place, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
    num_states = 0
    found = []
    for place, check in checks:
        output, _ = check.communicate()
        assert check.returncode == 0, f"a state killed the process ({check.returncode}): {(place / 'now').read_text()}"
        report = json.loads(output)
        num_states += report["num_states"]
        found += report["found"]
    assert not found, f"{len(found)} of {num_states} states, seed {seed}; the first: {json.dumps(found[0], indent=1)}"
    return num_states
