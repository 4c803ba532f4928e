"""Real disks that are full or read-only, and a process without descriptors: a tmpfs in a mount namespace of its own, so that nothing is left mounted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

SCRIPT = Path(__file__).with_name("small_disk.py")
TESTS = Path(__file__).parents[1]


def namespace() -> list[str]:
    """The beginning of a command that runs ``sh -c`` in a mount namespace of its own."""
    for flags in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        command = ["unshare", *flags, "--propagation", "private", "sh", "-ec"]
        if (
            shutil.which("unshare")
            and not subprocess.run([*command, "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode
        ):
            return command
    pytest.skip("needs root, or user namespaces, to mount a small disk")


@pytest.mark.parametrize(
    ("scenario", "lines"),
    [
        ("fills-up", ["serves on a disk that fills up", "goes on when there is room"]),
        ("starts-full", ["starts warm on a full disk"]),
        ("starts-readonly", ["starts warm on a read-only disk"]),
        ("no-descriptors", ["serves without a descriptor"]),
    ],
)
def test_a_real_disk(tmp_path, scenario, lines):
    (tmp_path / "state").mkdir()
    script = f"mount -t tmpfs -o size=48m,mode=700 none {tmp_path}/state; PYTHONPATH={TESTS} exec {sys.executable} {SCRIPT} {scenario} {tmp_path}"
    done = subprocess.run([*namespace(), script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.splitlines() == [*lines, "healed"]
