"""kvd doctor: which kernels compute the configured model here, and why not others."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = pytest.mark.torch

from gguf_files import Shape, write_gguf  # noqa: E402

from kvd.cli import app  # noqa: E402
from kvd.cli.exits import Exit  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402

MODULE = "kvd.executor.kernels.cpu._cpu"
ISAS = native.status().available_isas
needs_kernels = pytest.mark.skipif(not ISAS, reason="the native kernels are not there")


@pytest.fixture(autouse=True)
def _places(monkeypatch, tmp_path):
    monkeypatch.setenv("KVD_MODEL", str(write_gguf(tmp_path / "tiny.gguf", Shape(), "Q8_0")))
    monkeypatch.setenv("KVD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KVD_LISTEN", f"ipc://{tmp_path}/s.sock")
    monkeypatch.setenv("KVD_DEVICE", "cpu")
    monkeypatch.setenv("KVD_KV_MEMORY", "4MiB")


@pytest.fixture
def asked_anew(monkeypatch):
    """The module is looked for again, and once more behind the test."""
    native._module.cache_clear()
    yield
    monkeypatch.undo()
    native._module.cache_clear()
    if ISAS:
        native.module().set_isa(ISAS[-1])


def kernels(capsys, code: int = Exit.OK) -> str:
    assert app.main(["doctor", "--json"]) == code
    executor = json.loads(capsys.readouterr().out)["executor"]
    return executor.get("kernels") or executor["error"]


@needs_kernels
def test_the_family_is_that_of_the_configured_model(capsys, monkeypatch, tmp_path):
    family = f"cpu-{native.status().isa}-v"
    assert kernels(capsys).startswith(family)
    assert kernels(capsys).split(" ")[0].endswith("-quantised")
    monkeypatch.setenv("KVD_WEIGHTS", "dequantised")
    assert kernels(capsys).startswith(family)
    assert "quantised" not in kernels(capsys)
    monkeypatch.setenv("KVD_MODEL", str(write_gguf(tmp_path / "odd.gguf", Shape(head_dim=72), "F32")))
    assert kernels(capsys) == "torch (the model's head_dim is 72; they take multiples of 16 up to 256)"


@needs_kernels
@pytest.mark.skipif(len(ISAS) < 2, reason="this processor has one instruction set")
@pytest.mark.usefixtures("asked_anew")
def test_a_lower_instruction_set_says_who_chose_it(capsys, monkeypatch):
    monkeypatch.setenv(native.ISA_VARIABLE, "portable")
    assert kernels(capsys).startswith("cpu-portable-v")
    assert kernels(capsys).endswith(f"({ISAS[1]} is there, but the environment chooses portable)")


@pytest.mark.usefixtures("asked_anew")
def test_why_torch_computes(capsys, monkeypatch):
    monkeypatch.setenv("KVD_BLOCK_SIZE_TOKENS", "32")
    assert kernels(capsys) == "torch (block_size_tokens = 32; they read blocks of 16)"
    monkeypatch.delenv("KVD_BLOCK_SIZE_TOKENS")
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert kernels(capsys).startswith("torch (kvd was installed without them: there was no C++ compiler")
    monkeypatch.setenv("KVD_KERNELS", "native")
    assert kernels(capsys, Exit.CONFIG).startswith("ConfigError: kernels = 'native': kvd was installed without them")
    monkeypatch.setenv("KVD_KERNELS", "torch")
    assert kernels(capsys) == "torch (kernels = torch)"


def test_a_model_that_is_refused_is_a_problem(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KVD_MODEL", str(write_gguf(tmp_path / "other.gguf", Shape("gemma2"), "F32")))
    assert "architecture 'gemma2' is not supported" in kernels(capsys, Exit.CONFIG)
