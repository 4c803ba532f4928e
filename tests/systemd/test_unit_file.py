"""The unit file as systemd's own tools and its readers see it. Needs systemd-analyze, but neither root nor a running systemd."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from kvd.cli.exits import Exit
from kvd.config import DaemonConfig

pytestmark = pytest.mark.systemd

FOLDER = Path(__file__).parents[2] / "systemd"
UNIT = FOLDER / "kvd.service"
MAX_EXPOSURE = 2.0


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


def read_unit() -> dict[str, list[str]]:
    """The values of each key of the unit, in order."""
    keys = defaultdict(list)
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            keys[key].append(value)
    return dict(keys)


def seconds(value: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(ms|s)", value).groups()
    return int(number) / (1000 if unit == "ms" else 1)


def test_verify_has_nothing_to_say(tmp_path: Path) -> None:
    """The program is one that exists here; that the installed one is accepted too is seen on the private machine."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/kvd/bin/kvd", "/bin/true"), encoding="utf-8")
    verified = analyze("verify", "--man=no", unit)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


def test_verify_would_have_found_a_misspelt_key(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8").replace("/opt/kvd/bin/kvd", "/bin/true").replace("WatchdogSec", "WatchdogSek")
    unit.write_text(text, encoding="utf-8")
    assert "WatchdogSek" in analyze("verify", "--man=no", unit).stderr


@pytest.mark.parametrize("unit", [UNIT, FOLDER / "kvd-gateway.service"], ids=lambda unit: unit.name)
def test_exposure_is_small(unit: Path) -> None:
    scored = analyze("security", "--offline=yes", "--no-pager", unit)
    exposure = re.search(rf"Overall exposure level for {re.escape(unit.name)}: ([\d.]+)", scored.stdout)
    assert exposure, scored.stdout + scored.stderr
    assert float(exposure[1]) <= MAX_EXPOSURE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Type", "notify"),
        ("NotifyAccess", "main"),
        ("User", "kvd"),
        ("ExecStart", "/opt/kvd/bin/kvd serve --config /etc/kvd/kvd.toml"),
        ("StateDirectory", "kvd"),
        ("StateDirectoryMode", "0700"),
        ("RuntimeDirectory", "kvd"),
        ("RuntimeDirectoryMode", "0750"),
        ("Restart", "on-failure"),
        ("RestartPreventExitStatus", str(int(Exit.CONFIG))),
        ("KillMode", "mixed"),
        ("LimitCORE", "0"),
        ("UMask", "0077"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("SystemCallFilter", "@system-service"),
        ("WantedBy", "multi-user.target"),
    ],
)
def test_key(key: str, value: str) -> None:
    assert read_unit()[key][0] == value


@pytest.mark.parametrize("key", ["MemoryDenyWriteExecute", "ProcSubset", "DynamicUser"])
def test_what_the_daemon_can_not_live_with_is_left_out(key: str) -> None:
    """Kernels that are compiled at run time, processor detection, and a user that owns the models and stays the same."""
    assert key not in read_unit()


def test_times_fit_the_daemons_own() -> None:
    """A drain and the last checkpoint may take drain_timeout_s each."""
    unit = read_unit()
    assert seconds(unit["TimeoutStopSec"][0]) > 2 * DaemonConfig().engine.drain_timeout_s
    assert seconds(unit["WatchdogSec"][0]) >= 10
    assert seconds(unit["TimeoutAbortSec"][0]) < seconds(unit["TimeoutStopSec"][0])


def test_a_crash_loop_is_given_up_only_after_the_daemons_own_guard_has_acted() -> None:
    """Before that the store is set aside, and pins are no longer computed; either may be what kills it."""
    from kvd.storage.start_guard import NO_PINS_AT

    assert int(read_unit()["StartLimitBurst"][0]) > NO_PINS_AT + 1
