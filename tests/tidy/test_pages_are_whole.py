"""The overviews name all that there is: pages, programs, options and errors."""

from __future__ import annotations

import re
from pathlib import Path

from kvd_client import errors
from kvd_client.requests import GenerateOptions

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLIENT = ROOT / "clients/python"
CLIENT_README = (CLIENT / "README.md").read_text(encoding="utf-8")


def test_the_readme_lists_every_page() -> None:
    assert [page.name for page in sorted((ROOT / "docs").glob("*.md")) if f"(docs/{page.name})" not in README] == []


def test_the_clients_readme_lists_every_program() -> None:
    assert [page.name for page in sorted((CLIENT / "examples").glob("*.py")) if f"(examples/{page.name})" not in CLIENT_README] == []


def test_the_clients_readme_names_every_option_call_and_error() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.KvdError)}
    source = (CLIENT / "kvd_client/client.py").read_text(encoding="utf-8")  # its module needs zmq
    _, _, client = source.partition("\nclass Client")
    client, _, _ = client.partition("\nclass ")
    calls = {f"{name}(" for name in re.findall(r"^    def ([a-z]\w*)\(", client, re.MULTILINE)} - {"close(", "over("}
    assert "generate_many(" in calls
    named = {*GenerateOptions.__annotations__, *kinds}
    assert sorted(name for name in named if f"`{name}`" not in CLIENT_README) == []
    assert sorted(name for name in calls if f"`{name}" not in CLIENT_README) == []
