"""The house rules that no linter knows: sizes, docstrings, words, one version, no pickle."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from kvd_client.protocol.codes import Code

from kvd.types import ErrorCode

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
FILES = [ROOT / name for name in TRACKED if name and (ROOT / name).is_file()]
PYTHON = [path for path in FILES if path.suffix == ".py"]
PRODUCT = [path for path in PYTHON if path.is_relative_to(ROOT / "kvd") or path.is_relative_to(ROOT / "clients")]
TEXTS = [path for path in FILES if path.suffix in {".py", ".md", ".toml", ".sh", ".service", ".socket", ".conf", ""}]

MAX_LINES = 500
SERIALISERS_THAT_RUN_CODE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
MARKS = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error")))
BY_NAME_FROM_AN_INDEX = re.compile(
    r"""pip3? install (?:-\S+ (?:[^\s'"-]\S* )?)*?['"]?kvd(?:[-_]client)?(?:['"\s`\[=<>~!,;:]|$)""", re.MULTILINE
)
MACHINE_PATHS = re.compile("/wo" + "rk/|/tmp/br" + "ief|/tmp/mo" + "del|/tmp/llama" + "cpp|/ro" + "ot/")
BANNED_NAMES = {"utils", "util", "common", "base", "helpers", "helper", "misc"}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_look_at() -> None:
    assert len(PRODUCT) > 50
    assert len(TEXTS) > len(PRODUCT)


@pytest.mark.parametrize("path", PRODUCT, ids=named)
def test_a_module_is_small_says_what_it_is_for_and_reads_no_code_from_data(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_LINES or "kernels" in path.parts
    tree = ast.parse(source)
    if not {"examples", "tests"} & set(path.parts):
        assert ast.get_docstring(tree), "no module docstring"
    imported = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & SERIALISERS_THAT_RUN_CODE
    assert path.stem not in BANNED_NAMES


def test_every_package_says_what_it_owns() -> None:
    packages = {path.parent for path in PRODUCT if path.parent.is_relative_to(ROOT / "kvd")}
    assert [named(package) for package in sorted(packages) if not (package / "__init__.py").is_file()] == []


def test_nothing_is_left_for_later() -> None:
    assert [named(path) for path in TEXTS if MARKS.search(path.read_text(encoding="utf-8"))] == []


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    assert [named(path) for path in TEXTS if MACHINE_PATHS.search(path.read_text(encoding="utf-8"))] == []


def test_kvd_is_installed_from_its_sources() -> None:
    """An index has somebody else's package under its name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    by_extra = re.compile(rf"kvd\[(?:{'|'.join(extras)})\b")
    for line in (
        "pip install kvd",
        "python -m pip install -q -c FILE 'kvd'",
        "pip install kvd-client`",
        "pip install kvd==0.1.0",
        "pip install 'kvd" + "[x]'",
    ):
        assert BY_NAME_FROM_AN_INDEX.search(line), line
    for line in ("pip install ./clients/python", "pip install '.[http]' in kvd's checkout", "pip install '$sources[http]'"):
        assert not BY_NAME_FROM_AN_INDEX.search(line), line
    pages = [path for path in TEXTS if path != Path(__file__)]
    texts = {named(path): path.read_text(encoding="utf-8") for path in pages}
    assert [name for name, text in texts.items() if BY_NAME_FROM_AN_INDEX.search(text) or by_extra.search(text)] == []


def test_tests_have_different_names() -> None:
    """They are no packages: two modules of one name would be one to the test runner."""
    names = [path.name for path in PYTHON if path.is_relative_to(ROOT / "tests")]
    assert sorted(name for name in set(names) if names.count(name) > 1 and name != "conftest.py") == []


def test_daemon_and_wire_have_the_same_codes() -> None:
    assert {code.name: code.value for code in ErrorCode} == {code.name: code.value for code in Code}


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    client = tomllib.loads((ROOT / "clients/python/pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    assert client["version"] == version
    assert f"kvd-client=={version}" in project["dependencies"]
    released = re.findall(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == version
    for readme in (ROOT / "README.md", ROOT / "clients/python/README.md"):
        assert set(re.findall(r"\bkvd(?:-client)?(?:==| )v?(\d+\.\d+\.\d+)\b", readme.read_text(encoding="utf-8"))) <= {version}


def test_pages_link_to_what_is_there() -> None:
    pages = [path for path in FILES if path.suffix == ".md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))]
    assert [f"{named(page)} -> {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_pages_name_the_targets_of_make() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    targets = set(phony.split())
    pages = [path for path in FILES if path.suffix == ".md"]
    calls = [(page, target) for page in pages for target in re.findall(r"`make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"))]
    assert [f"{named(page)}: make {target}" for page, target in calls if target not in targets] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert sorted(target for target in targets - {"clean", "model"} if not re.search(rf"(make |`){target}\b(?!-)", readme)) == []
