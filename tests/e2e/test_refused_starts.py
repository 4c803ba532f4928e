"""Starts that end in order: the exit code, one line that says why, nothing left behind, and no failed start counted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.socket, pytest.mark.store]

CONFIG, TEMPORARY = 78, 75
FAKE = ("--executor", "fake")


@pytest.fixture(params=["thread", "process"])
def frontend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def serve(root: Path, *arguments: str, state_dir: Path | None = None, listen: str = "") -> tuple[int, str]:
    """Start a daemon that is to end by itself; its exit code and what it wrote."""
    command = [sys.executable, "-m", "kvd", "serve", "--log-format", "json", "--state-dir", str(state_dir or root / "state")]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KVD_")}
    done = subprocess.run(
        [*command, "--listen", listen or f"ipc://{root}/s.sock", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def assert_refused(root: Path, *arguments: str, says: str, **options: object) -> str:
    """Exit 78 with one line, which has ``says`` in it; two failed starts before it stay two, and the socket's file is gone."""
    state = root / "state"
    state.mkdir(exist_ok=True)
    (state / "starting").write_text("2 1\n")
    code, output = serve(root, *arguments, **options)  # type: ignore[arg-type]
    assert code == CONFIG, output
    lines = [line for line in output.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, output
    assert lines[0].startswith("kvd: ")
    assert says in lines[0]
    assert (state / "starting").read_text().split()[0] == "2"
    assert not (root / "s.sock").exists()
    return output


# ------------------------------------------------------------------------------------------------ models


def test_a_model_without_a_tokenizer(tmp_path: Path, frontend: str) -> None:
    model = tiny_models.make_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    assert_refused(tmp_path, "--model", str(model), "--frontend", frontend, says=f"{model}: no tokenizer.json")


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece is not supported; supported: BPE"), ([], "not a JSON")],
)
def test_a_model_with_a_tokenizer_that_is_not_supported(tmp_path: Path, frontend: str, tokenizer: object, says: str) -> None:
    model = tiny_models.make_model(tmp_path / "model")
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert_refused(tmp_path, "--model", str(model), "--frontend", frontend, says=says)


def test_an_architecture_is_refused_before_the_tokenizer_is_looked_at_or_an_endpoint_opened(tmp_path: Path) -> None:
    model = tiny_models.make_model(tmp_path / "model", architectures=["T5ForConditionalGeneration"], model_type="t5")
    (model / "tokenizer.json").unlink()
    output = assert_refused(tmp_path, "--model", str(model), says="Qwen3 (qwen3)")
    assert "t5" in output.lower()
    assert "listening" not in output


@pytest.mark.parametrize("junk", [b"", b"junk" * 99, b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 99])
def test_a_file_that_is_no_model(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(junk)
    output = assert_refused(tmp_path, "--model", str(tmp_path / "model.gguf"), says="model.gguf")
    assert "listening" not in output


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path, "--model", str(tmp_path / "empty"), says="no config.json")


def test_weights_that_are_cut_short(tmp_path: Path) -> None:
    model = tiny_models.make_model(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(tmp_path, "--model", str(model), says="model.safetensors")


# ------------------------------------------------------------------------------------------------ state directory and memory


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/kvd-state"])
def test_a_state_directory_that_can_not_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("precious")
    assert_refused(tmp_path, *FAKE, state_dir=tmp_path / place, says=f"state_dir = {tmp_path / place}")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_state_directory_with_a_file_where_a_directory_must_be(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "recipes").write_text("precious")
    assert_refused(tmp_path, *FAKE, says="state/recipes")
    assert (tmp_path / "state" / "recipes").read_text() == "precious"


@pytest.mark.parametrize("size", ["100TiB", "9000000000GiB"])
def test_a_pool_beyond_this_machines_memory(tmp_path: Path, size: str) -> None:
    model = tiny_models.make_model(tmp_path / "model")
    num_bytes = int(size[:-3]) << {"G": 30, "T": 40}[size[-3]]
    for executor in (("--model", str(model)), FAKE):
        assert_refused(tmp_path, *executor, "--kv-memory", size, says=f"kv_memory = {num_bytes}: ")


# ------------------------------------------------------------------------------------------------ endpoints


def test_an_endpoint_in_use_is_worth_another_attempt(tmp_path: Path, frontend: str) -> None:
    with DaemonProcess(tmp_path, "--executor", "fake", "--listen", "tcp://127.0.0.1:0") as process:
        process.wait_ready()
        (port,) = {
            url.rpartition(":")[2]
            for line in process.log().splitlines()
            if line.startswith("{")
            for url in json.loads(line).get("endpoints", ())
            if url.startswith("tcp")
        }
        for endpoint in (process.endpoint, f"tcp://127.0.0.1:{port}"):
            code, output = serve(tmp_path, *FAKE, "--frontend", frontend, state_dir=tmp_path / "other", listen=endpoint)
            assert code == TEMPORARY, output
            assert endpoint in output
            assert "Traceback" not in output
            assert not (tmp_path / "other" / "starting").exists()
        with process.client() as client:
            assert client.ping().state == "ready"
        assert process.terminate() == 0


def test_a_missing_directory_of_an_endpoint_is_not_made(tmp_path: Path, frontend: str) -> None:
    says = f"the directory {tmp_path}/typo does not exist"
    assert_refused(tmp_path, *FAKE, "--frontend", frontend, listen=f"ipc://{tmp_path}/typo/s.sock", says=says)
    assert not (tmp_path / "typo").exists()


def test_a_file_in_the_place_of_the_socket_stays(tmp_path: Path, frontend: str) -> None:
    (tmp_path / "file").write_text("precious")
    assert_refused(tmp_path, *FAKE, "--frontend", frontend, listen=f"ipc://{tmp_path}/file", says="not a socket")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_dead_daemons_socket_is_no_endpoint_in_use(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s.sock"))
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        assert process.terminate() == 0


# ------------------------------------------------------------------------------------------------ a small pool


def test_a_request_of_default_length_fills_a_small_pool(tmp_path: Path) -> None:
    """512 bytes a block of 16: ten blocks hold 160 positions, whatever the model could do."""
    with DaemonProcess(tmp_path, "--kv-memory", "5KiB") as process:
        process.wait_ready()
        with process.client() as client:
            prompt = "A prompt of some length. "
            answer = client.generate(prompt, temperature=0.0, ignore_eos=True)
            assert answer.finish_reason == "length"
            assert list(answer.token_ids) == expected_tokens(prompt.encode(), 160 - len(prompt))
        assert process.terminate() == 0
