"""Weights packed for the native kernels: every row is what the torch decoder gets from the same file, quantised ones as the file has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from gguf_files import Shape, random_quantised, write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from kvd.executor.kernels.cpu import native
from kvd.executor.models.decoder import DecoderWeights
from kvd.executor.models.gguf_file import STORAGE_TYPES
from kvd.executor.models.inspect import inspect_model
from kvd.executor.models.spec import WeightsError, fit_length
from kvd.executor.models.weights.load import load_decoder
from kvd.executor.models.weights.native import KEPT, NativeWeights, keeps_quantised, load_native

pytestmark = pytest.mark.torch

if native.status().isa is None:
    pytest.skip(native.status().reason, allow_module_level=True)

SHAPES = {
    "llama": Shape("llama"),
    "llama-tied": Shape("llama", tied=True, heads=4, kv_heads=1, head_dim=128),
    "qwen2": Shape("qwen2"),
    "qwen3": Shape("qwen3", head_dim=128),
}
MIXED = {"attn_v": "Q6_K", "ffn_up": "Q8_0", "ffn_down": "F16", "token_embd": "Q5_K"}
"""As in files whose tensors are quantised by their importance."""


def load(path: Path, *, dtype: str = "float32", quantised: bool = True, **more: Any) -> NativeWeights:
    spec, _ = fit_length(inspect_model(path), 0)
    return load_native(path, spec, dtype=dtype, pool=native.pool(2), quantised=quantised, **more)


def torch_weights(path: Path) -> DecoderWeights:
    spec, _ = fit_length(inspect_model(path), 0)
    return load_decoder(path, spec, dtype=torch.float32, device="cpu").weights


def rows_of(parts: Any) -> torch.Tensor:
    """The rows of packed matrices, one below the other."""
    rows = []
    for matrix in parts if isinstance(parts, tuple) else (parts,):
        for row in range(matrix.n):
            rows.append(torch.empty(matrix.k))
            matrix.unpack_row(row, rows[-1].numpy())
    return torch.stack(rows)


def all_parts(weights: Any) -> dict[str, Any]:
    parts = {name: getattr(weights, name) for name in ("embedding", "final_norm", "head")}
    for index, layer in enumerate(weights.layers):
        parts |= {f"{index}.{name}": getattr(layer, name) for name in type(layer).__slots__}
    return {name: value for name, value in parts.items() if value is not None}


def assert_equal(packed: NativeWeights, expected: DecoderWeights, *, rounded: bool = False) -> None:
    ours, theirs = all_parts(packed), all_parts(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if isinstance(ours[name], np.ndarray):
            assert torch.equal(torch.from_numpy(ours[name]), tensor), name
        else:
            assert torch.equal(rows_of(ours[name]), tensor.bfloat16().float() if rounded else tensor), name


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("shape", "kind"), [*(("llama", kind) for kind in STORAGE_TYPES), ("llama-tied", "Q6_K"), ("qwen2", "Q8_0"), ("qwen3", "Q4_1")]
)
def test_a_gguf_file_is_packed_as_torch_reads_it(shape: str, kind: str, quantised: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES[shape], kind)
    packed = load(path, quantised=quantised)
    assert_equal(packed, torch_weights(path))
    assert (packed.head is packed.embedding) == SHAPES[shape].tied
    assert {len(layer.qkv) for layer in packed.layers} == {len(layer.gate_up) for layer in packed.layers} == {1}


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_K", "F16", "F32"])
def test_what_is_not_kept_is_rounded_to_the_dtype(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], kind)
    packed, expected = load(path, dtype="bfloat16", quantised=False), torch_weights(path)
    torch.testing.assert_close(rows_of(packed.layers[1].qkv), expected.layers[1].qkv.bfloat16().float(), rtol=0, atol=0)
    assert packed.embedding.bytes == 128 * 256 * 2  # 96 rows, in panels of 64


def test_parts_of_different_storage_types_stay_apart(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "Q4_K", kinds=MIXED)
    packed = load(path)
    assert_equal(packed, torch_weights(path))
    query_key, value = packed.layers[0].qkv
    assert (query_key.n, value.n) == (256 + 128, 128)
    assert [part.n for part in packed.layers[0].gate_up] == [256, 256]
    assert value.bytes == 128 * 210
    assert packed.layers[0].down.bytes == 256 * 256 * 4
    (whole,) = load(path, quantised=False).layers[0].qkv
    assert whole.n == 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_are_packed_as_torch_reads_them(dtype: torch.dtype, tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path / "model.safetensors").items()}, path / "model.safetensors")
    assert_equal(load(path), torch_weights(path))
    packed = load(path, dtype="bfloat16")
    assert torch.equal(rows_of(packed.layers[1].down), torch_weights(path).layers[1].down.bfloat16().float())


@pytest.mark.parametrize("kind", STORAGE_TYPES)
def test_stored_rows_are_read_to_their_last_byte_and_no_further(kind: str) -> None:
    """In memory that ends with them: behind a mapped file's the address sanitizer sees nothing."""
    module, pool = native.module(), native.pool(2)
    stored = random_quantised((96, 512), kind, np.random.default_rng(5)).copy()
    expected = torch.from_numpy(dequantize(stored, GGMLQuantizationType[kind]).astype(np.float32))
    halves = expected.unflatten(0, (3, 16, 2)).transpose(1, 2).reshape(96, 512)  # heads of 32 rows, even ones first
    for fmt in ("f32", *((kind.lower(),) if kind in KEPT else ())):
        for head_dim, rows in ((0, expected), (32, halves)):
            matrix = module.Matrix(fmt, 100, 512)
            module.load_rows(matrix, pool, 3, 96, stored.ctypes.data, kind, head_dim)
            assert torch.equal(rows_of(matrix)[3:99], rows)
    values = np.empty(512, np.float32)
    module.load_values(stored[-1:].ctypes.data, kind, values)
    assert torch.equal(torch.from_numpy(values), expected[-1])


def test_what_does_not_fill_blocks_is_refused_and_not_left_out() -> None:
    stored = np.zeros(4096, np.uint8)
    with pytest.raises(ValueError, match="does not fill its blocks"):
        native.module().load_values(stored.ctypes.data, "Q8_0", np.empty(33, np.float32))
    with pytest.raises(TypeError):
        native.module().load_values(stored.ctypes.data, "F32", np.empty(32))


def test_progress_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["qwen2"], "Q4_0")
    calls: list[tuple[int, int]] = []
    load(path, progress=lambda *call: calls.append(call))
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert calls[-1] == (calls[0][1], calls[0][1])


def test_files_that_do_not_fit_are_refused_like_torchs(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(path)


def test_what_stays_quantised(tmp_path: Path) -> None:
    for kind in STORAGE_TYPES:
        spec = inspect_model(write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], kind))
        assert keeps_quantised(spec, "auto") == (kind in KEPT)
        assert not keeps_quantised(spec, "dequantised")
