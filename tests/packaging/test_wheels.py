"""Both distributions, built from their sdists and installed into bare environments: what a user gets, and what it needs.

Nothing is fetched: requirements are links to what is installed here, one for each distribution that the metadata names, and nothing else is importable.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from fake_oracle import expected_tokens
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tiny_models import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store, pytest.mark.torch]

ROOT = Path(__file__).parents[2]
SOURCES = {"kvd": ROOT, "kvd-client": ROOT / "clients" / "python"}
PACKAGES = {"kvd": "kvd", "kvd-client": "kvd_client"}
PATH = "/usr/bin:/bin"
NATIVE = "kvd/executor/kernels/cpu"
SHOW_NATIVE = "from kvd.executor.kernels.cpu import native; status = native.status(); print(status.isa, status.reason)"
ASK = """
from kvd_client import Client
with Client({endpoint!r}, connect_timeout_s=60) as client:
    client.wait_ready(timeout_s=60)
    print(client.status()["kernels"], *client.generate("What is a wheel?", max_tokens=8, temperature=0.0, ignore_eos=True).token_ids)
"""


@dataclass(frozen=True, slots=True)
class Built:
    """One distribution as it would be published."""

    sdist: Path
    wheel: Path

    def sdist_names(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            return {name.partition("/")[2] for name in archive.getnames()}

    def wheel_names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def read(self, ending: str) -> str:
        """The one file of the wheel whose name ends so."""
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(ending))
            return archive.read(name).decode()

    @property
    def metadata(self) -> Message:
        return Parser().parsestr(self.read(".dist-info/METADATA"))


def project(name: str) -> dict:
    return tomllib.loads((SOURCES[name] / "pyproject.toml").read_text())["project"]


def build(name: str, copy: Path, out: Path, path: str = PATH) -> Built:
    """An sdist, and a wheel made from the unpacked sdist, of a copy of the sources: a checkout's ``build`` folder must not leak in."""
    source = SOURCES[name]
    for entry in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(source / entry, copy)
    shutil.copytree(source / PACKAGES[name], copy / PACKAGES[name], ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy), path=path)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """Both distributions, built where there is no compiler: the checkout's own module must not leak in either."""
    tools = tmp_path_factory.mktemp("tools")
    for tool in ("cmake", "ninja"):
        (tools / tool).symlink_to(shutil.which(tool, path=f"{PATH}:{Path(sys.executable).parent}"))
    return {name: build(name, tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist"), str(tools)) for name in SOURCES}


def run(*command: str, cwd: Path | None = None, path: str = PATH) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env={"PATH": path, "HOME": tempfile.gettempdir()}
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def closure(names: set[str]) -> dict[str, Distribution]:
    """The installed distributions of these names and of all that they require here, by canonical name."""
    found: dict[str, Distribution] = {}
    waiting = set(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found[name] = distribution(name)
        requirements = map(Requirement, found[name].requires or ())
        waiting |= {item.name for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})}
    return found


def bare_environment(folder: Path, requirements: list[str]) -> Path:
    """A virtual environment in which nothing is installed but links to these requirements and theirs; its interpreter."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    packages = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for installed in closure({Requirement(item).name for item in requirements}).values():
        tops = {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (packages / top).exists():
                (packages / top).symlink_to(installed.locate_file(top))
    return python


def install(python: Path, *wheels: Path) -> None:
    """As a user would, without an index; pip refuses if a requirement is not met by what is there."""
    links = [part for wheel in wheels for part in ("--find-links", str(wheel.parent))]
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index", *links, str(wheels[0]))
    run(sys.executable, "-m", "pip", "--python", str(python), "check")


@pytest.fixture(scope="module")
def client_python(built: dict[str, Built], tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = bare_environment(tmp_path_factory.mktemp("client"), project("kvd-client")["dependencies"])
    install(python, built["kvd-client"].wheel)
    return python


@pytest.fixture(scope="module")
def daemon_python(built: dict[str, Built], tmp_path_factory: pytest.TempPathFactory) -> Path:
    others = [item for item in project("kvd")["dependencies"] if Requirement(item).name != "kvd-client"]
    python = bare_environment(tmp_path_factory.mktemp("daemon"), others)
    install(python, built["kvd"].wheel, built["kvd-client"].wheel)
    return python


@pytest.fixture
def endpoint(daemon_python: Path, tmp_path: Path) -> Iterator[str]:
    """A daemon on the fake executor, started by the installed command."""
    address = f"ipc://{tmp_path}/s.sock"
    command = [daemon_python.parent / "kvd", "serve", "--executor", "fake", "--state-dir", tmp_path / "state", "--listen", address]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, cwd=tmp_path, env={"HOME": str(tmp_path)})
    yield address
    process.terminate()
    assert process.wait(60) == 0, (tmp_path / "log").read_text()


def test_one_version_everywhere(built: dict[str, Built]) -> None:
    version = project("kvd")["version"]
    assert project("kvd-client")["version"] == version
    headings = re.findall(r"^## \[?([0-9][^\]\s]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version
    assert {name: item.metadata["Version"] for name, item in built.items()} == dict.fromkeys(SOURCES, version)


def test_kvd_requires_the_client_at_exactly_its_own_version(built: dict[str, Built]) -> None:
    requirements = [Requirement(item) for item in built["kvd"].metadata.get_all("Requires-Dist")]
    (client,) = (item for item in requirements if item.name == "kvd-client")
    assert str(client.specifier) == f"=={built['kvd'].metadata['Version']}"
    assert client.marker is None


@pytest.mark.parametrize("name", SOURCES)
def test_licence_types_and_all_modules_are_inside(built: dict[str, Built], name: str) -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert built[name].read(".dist-info/licenses/LICENSE") == licence
    assert built[name].metadata["License-Expression"] == "Apache-2.0"
    assert {"LICENSE", "README.md", "pyproject.toml", f"{PACKAGES[name]}/py.typed"} <= built[name].sdist_names()
    modules = {str(path.relative_to(SOURCES[name])) for path in (SOURCES[name] / PACKAGES[name]).rglob("*.py")}
    assert len(modules) > 10
    shipped = {entry for entry in built[name].wheel_names() if ".dist-info/" not in entry}
    assert shipped == modules | {f"{PACKAGES[name]}/py.typed"}
    assert built[name].wheel.name.endswith("-py3-none-any.whl")


def test_sources_of_the_kernels_are_in_the_sdist(built: dict[str, Built]) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / NATIVE).iterdir() if path.suffix in {".cpp", ".h", ".txt"}}
    assert len(sources) > 10
    assert sources <= built["kvd"].sdist_names()
    assert not {"tests", "clients", "docs"} & {entry.partition("/")[0] for entry in built["kvd"].sdist_names()}


def test_without_a_compiler_there_are_no_native_kernels_and_that_is_said(daemon_python: Path, tmp_path: Path) -> None:
    """What else works there the tests of the installed daemon show."""
    assert run(str(daemon_python), "-c", SHOW_NATIVE, cwd=tmp_path).startswith(
        "None kvd was installed without them: there was no C++ compiler"
    )


def test_without_a_compiler_torch_computes_and_the_log_says_why(daemon_python: Path, tmp_path: Path) -> None:
    model, address = make_model(tmp_path / "model"), f"ipc://{tmp_path}/s.sock"
    options = ["--model", model, "--device", "cpu", "--dtype", "float32", "--kv-memory", "4MiB", "--state-dir", tmp_path / "state"]
    command = [daemon_python.parent / "kvd", "serve", *options, "--listen", address, "--log-format", "json"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, cwd=tmp_path, env={"HOME": str(tmp_path)})
    try:
        kernels, *token_ids = run(str(daemon_python), "-c", ASK.format(endpoint=address), cwd=tmp_path).split()
    finally:
        process.terminate()
        assert process.wait(60) == 0, (tmp_path / "log").read_text()
    assert kernels == "torch-cpu"
    assert len(token_ids) == 8
    (warning,) = (line for line in map(json.loads, (tmp_path / "log").read_text().splitlines()) if line["event"] == "torch_computes")
    assert warning["level"] == "warning"
    assert "there was no C++ compiler" in warning["reason"]


@pytest.mark.full
@pytest.mark.timeout(1800)  # three instruction sets take minutes beside other tests
def test_with_a_compiler_the_wheel_brings_native_kernels(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    wheel = build("kvd", source, tmp_path / "dist")
    (module,) = (entry for entry in wheel.wheel_names() if entry.startswith(f"{NATIVE}/_cpu."))
    assert module.endswith(".so")
    assert not any(entry.endswith((".cpp", ".h", ".txt")) for entry in wheel.wheel_names() if ".dist-info/" not in entry)
    with zipfile.ZipFile(wheel.wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    shown = run(
        sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'unpacked')!r}); {SHOW_NATIVE}", cwd=tmp_path
    )  # -S: not the checkout's
    assert shown.split()[0] in {"portable", "avx2", "avx512"}


def test_installed_command(daemon_python: Path, tmp_path: Path) -> None:
    kvd = str(daemon_python.parent / "kvd")
    assert run(kvd, "version", cwd=tmp_path).strip() == f"kvd {project('kvd')['version']}"
    shown = run(kvd, "--help", cwd=tmp_path)
    assert {"serve", "demo", "pull", "generate"} <= set(shown.split())
    assert run(str(daemon_python), "-c", "import kvd; print(kvd.__file__)", cwd=tmp_path).startswith(str(daemon_python.parents[1]))


def test_client_alone_talks_to_the_daemon(client_python: Path, endpoint: str, tmp_path: Path) -> None:
    present = "import importlib.util as u; print(*[name for name in ('kvd', 'torch', 'lmdb', 'numpy', 'kvd_client') if u.find_spec(name)])"
    assert run(str(client_python), "-c", present, cwd=tmp_path).split() == ["kvd_client"]
    kernels, *tokens = run(str(client_python), "-c", ASK.format(endpoint=endpoint), cwd=tmp_path).split()
    assert kernels == "fake"
    assert list(map(int, tokens)) == expected_tokens(b"What is a wheel?", 8)
