"""Which of these tests this machine can run, and the machine that they share.

Tests that use a ``machine`` or a ``bare_machine`` need root and namespaces, the other ``systemd`` tests need systemd-analyze. Where that is missing they are left out,
and the summary says so; with KVD_TEST_SYSTEMD=require they are errors instead.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_systemd import PrivateSystemd, why_impossible

ROOT = Path(__file__).parents[2]
_PREFIX = Path("/opt/kvd")
_INTERPRETER = _PREFIX / "python"
_PACKAGES = _PREFIX / "packages"
_LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("KVD_TEST_SYSTEMD") == "require":
        return
    reason_of = {
        True: functools.cache(why_impossible),
        False: lambda: "" if shutil.which("systemd-analyze") else "systemd-analyze is not installed",
    }
    left_out: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        needs_machine = bool({"machine", "bare_machine"} & set(getattr(item, "fixturenames", ())))
        reason = reason_of[needs_machine]() if item.get_closest_marker("systemd") else ""
        left_out.update([reason] if reason else [])
        (dropped if reason else kept).append(item)
    if dropped:
        config.stash[_LEFT_OUT] = left_out
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in config.stash.get(_LEFT_OUT, Counter()).items():
        terminalreporter.section("systemd tests left out", yellow=True)
        terminalreporter.line(f"{count} were not run here: {reason} (KVD_TEST_SYSTEMD=require makes this an error)")


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSystemd]:
    """A running machine with this checkout's kvd in /opt/kvd and the unit as ``make install`` puts it there, the daemon not started."""
    assert not (reason := why_impossible()), f"no private systemd on this machine: {reason}"
    binds = {Path(sysconfig.get_path("purelib")): _PACKAGES}
    if Path(sys.base_prefix) != Path("/usr"):
        binds[Path(sys.base_prefix)] = _INTERPRETER
    with PrivateSystemd(tmp_path_factory.mktemp("machine"), binds) as private:
        _install(private)
        yield private


@pytest.fixture
def bare_machine(tmp_path: Path) -> Iterator[PrivateSystemd]:
    """A running machine without kvd; the checkout lies read-only in /usr/src/kvd."""
    assert not (reason := why_impossible()), f"no private systemd on this machine: {reason}"
    work = tmp_path / "bare"
    work.mkdir()
    with PrivateSystemd(work, {ROOT: Path("/usr/src/kvd")}) as private:
        yield private


def _install(private: PrivateSystemd) -> None:
    """What a venv in /opt/kvd would be, made of this interpreter, its packages and a copy of the checkout, without downloading any."""
    prefix = private.root / _PREFIX.relative_to("/")
    bin_dir = _INTERPRETER / "bin" if Path(sys.base_prefix) != Path("/usr") else Path("/usr/bin")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = prefix / "lib" / version / "site-packages"
    site_packages.mkdir(parents=True)
    (site_packages / "packages.pth").write_text(f"{_PACKAGES}\n", encoding="utf-8")
    for package in ("kvd", "kvd_client"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, site_packages / package)
    (prefix / "pyvenv.cfg").write_text(f"home = {bin_dir}\ninclude-system-site-packages = false\n", encoding="utf-8")
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(bin_dir / version)
    command = prefix / "bin" / "kvd"
    command.write_text(f"#!{_PREFIX}/bin/python\nimport sys\nfrom kvd.__main__ import main\nsys.exit(main())\n", encoding="utf-8")
    command.chmod(0o755)
    if bin_dir.is_relative_to(_INTERPRETER):  # an interpreter that was built for another place finds its library here
        (private.root / "etc/ld.so.conf.d/kvd-test.conf").write_text(f"{_INTERPRETER}/lib\n", encoding="utf-8")
        private.run("ldconfig")
    shutil.copytree(ROOT / "systemd", private.root / "usr/src/kvd/systemd")
    private.run("chmod", "-R", "a+rX", *(f"{_PREFIX}/{name}" for name in ("bin", "lib", "pyvenv.cfg")), "/usr/src/kvd")
    private.run("sh", "/usr/src/kvd/systemd/install.sh", "--unit-only")
