"""A machine of its own for a test: a real systemd as PID 1 in new namespaces over an overlay of /. Needs root; nothing outside is changed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BOOT_TIMEOUT_S = 60.0
_BOOT_SCRIPT = Path(__file__).with_name("private_machine.sh")
_CGROUP_ROOTS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
_NAMESPACES = ("--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup")
_PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def why_impossible() -> str:
    """Why no private systemd can be had here; empty if it can."""
    missing = [name for name in ("unshare", "nsenter", "setpriv", "systemctl", "mount") if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "not root"
    if missing or not Path("/lib/systemd/systemd").exists():
        return f"not installed: {', '.join(missing or ['systemd'])}"
    if not any((root / "cgroup.procs").exists() for root in _CGROUP_ROOTS):
        return "no cgroup v2 hierarchy"
    probe = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "--net", "--cgroup", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return probe.stderr.strip()


def wait_for(condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 90.0) -> None:
    """Poll until ``condition`` holds; AssertionError with ``what`` if it does not within ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what if isinstance(what, str) else what()
        time.sleep(0.05)


class PrivateSystemd:
    """Boots on entry, is gone with everything in it on exit.

    Args:
        work: an empty folder; mounted over inside the machine's namespace only.
        binds: folders outside to paths in the machine where they appear, read-only.
    """

    def __init__(self, work: Path, binds: Mapping[Path, Path]) -> None:
        self._work = work
        self._binds = binds
        self._log = work.with_name(work.name + ".log")
        self._cgroup = next(root for root in _CGROUP_ROOTS if (root / "cgroup.procs").exists()) / f"kvd-test-{os.getpid()}-{work.name}"
        self._outer: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        self._cgroup.mkdir()
        try:
            self._boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _boot(self) -> None:
        unshare = ["unshare", *_NAMESPACES, "--fork", "--propagation", "private", "--kill-child=SIGKILL"]
        machine = ["sh", str(_BOOT_SCRIPT), str(self._work), *(f"{source}:{target}" for source, target in self._binds.items())]
        into_cgroup = ["sh", "-euc", 'echo $$ >"$0/cgroup.procs"; exec "$@"', str(self._cgroup)]
        with self._log.open("wb") as log:
            self._outer = subprocess.Popen(
                # with the test's process the machine dies too, however that ends; the kernel's modules and clock are not its own
                ["setpriv", "--pdeathsig", "KILL", "--bounding-set", "-sys_module,-sys_time", *into_cgroup, *unshare, *machine],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_for(self._is_up, self.boot_log, BOOT_TIMEOUT_S)

    def _is_up(self) -> bool:
        outer = self._outer
        assert outer is not None
        assert outer.poll() is None, f"the machine did not boot:\n{self.boot_log()}"
        if not self._pid:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text(encoding="ascii").split()
            if not children or Path(f"/proc/{children[0]}/comm").read_text(encoding="utf-8").strip() != "systemd":
                return False
            self._pid = int(children[0])
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() in {"running", "degraded"}

    def close(self) -> None:
        """Kill PID 1: the kernel ends its processes and takes its mounts away."""
        if self._outer is not None:
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            self._outer.kill()
            self._outer.wait()
            self._outer = None
        for _ in range(100):
            with contextlib.suppress(OSError):
                for folder in sorted(self._cgroup.rglob("*/"), reverse=True):
                    folder.rmdir()
                self._cgroup.rmdir()
            if not self._cgroup.exists():
                return
            time.sleep(0.05)

    def boot_log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def root(self) -> Path:
        """The machine's / as seen from outside."""
        return Path(f"/proc/{self._pid}/root")

    def run(
        self,
        *command: str,
        check: bool = True,
        user: str = "",
        env: Mapping[str, str] | None = None,
        outer_network: bool = False,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine.

        Args:
            command: program and arguments, looked up in the machine.
            check: fail the test if it does not succeed.
            user: as whom, with this user's own group alone; empty: root.
            env: further environment; nothing of the test's own is passed on.
            outer_network: with the network outside, which the machine itself has not.
            timeout_s: until it must be over.
        """
        namespaces = [name for name in _NAMESPACES if name != "--net" or not outer_network]
        enter = ["nsenter", f"--target={self._pid}", *namespaces, f"--root={self.root}", f"--wd={self.root}"]
        clean = ["env", "-i", f"PATH={_PATH}", "LANG=C.UTF-8", "HOME=/", *(f"{key}={value}" for key, value in (env or {}).items())]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        result = subprocess.run([*enter, *clean, *become, *command], capture_output=True, text=True, check=False, timeout=timeout_s)
        assert not check or result.returncode == 0, f"{' '.join(command)}: {result.returncode}\n{result.stdout}{result.stderr}"
        return result

    def systemctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", *arguments, check=check)

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """``systemctl show``: properties of a unit as text."""
        lines = self.systemctl("show", unit, *(f"--property={name}" for name in properties)).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if line)

    def journal(self, unit: str) -> list[dict[str, Any]]:
        """The unit's records of this boot, oldest first."""
        lines = self.run("journalctl", "--unit", unit, "--output=json", "--all", "--no-pager").stdout.splitlines()
        return [json.loads(line) for line in lines]
