"""The native pool: rows are plain bytes, and what the kernels write is K and V in the order that the layout names."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

from dataclasses import dataclass  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from kvd.config import ConfigError  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.kv_pool import KvPool  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool, native_row_bytes, resolve_kv_type  # noqa: E402

KV_TYPES = ("float32", "bfloat16", "int8")
needs_kernels = pytest.mark.skipif(native.status().isa is None, reason="kvd was installed without its native kernels")


@dataclass(frozen=True)
class Shape:
    num_layers: int = 3
    num_kv_heads: int = 2
    head_dim: int = 32


SPEC = Shape()


def row(pool, block):
    memory = bytearray(pool.row_bytes)
    pool.read_blocks([block], memoryview(memory))
    return memory


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_rows_go_out_in_and_over_byte_for_byte(kv_type):
    pool = NativeKvPool(SPEC, 6, kv_type)
    assert pool.address % 64 == 0
    assert bytes(row(pool, 5)) == bytes(pool.row_bytes)
    noise = np.random.default_rng(1).integers(0, 256, 6 * pool.row_bytes, dtype=np.uint8)
    pool.write_blocks(range(6), memoryview(noise))
    size = pool.row_bytes
    pool.copy_blocks([1], [4])
    pool.clear_blocks(np.array([2]))
    assert row(pool, 4) == row(pool, 1) == noise[size : 2 * size].tobytes()
    assert bytes(row(pool, 2)) == bytes(size)
    other = pool.scratch(2)
    assert (other.num_blocks, other.layout, other.row_bytes) == (2, pool.layout, size)
    with pytest.raises(IndexError):
        other.read_blocks([2], memoryview(bytearray(size)))


def test_sizes_and_layouts():
    sizes = {kv_type: native_row_bytes(SPEC, kv_type) for kv_type in KV_TYPES}
    values = 3 * 2 * 2 * 16 * 32
    assert sizes == {"float32": values * 4, "bfloat16": values * 2, "int8": values + values // 32 * 4}
    layouts = {NativeKvPool(SPEC, 1, kv_type).layout for kv_type in KV_TYPES} | {KvPool(SPEC, 1, 16, torch.float32, "cpu").layout}
    assert len(layouts) == 4, "each order of bytes has a name of its own"


@needs_kernels
def test_sizes_are_the_kernels_own():
    for kv_type in KV_TYPES:
        assert native.module().kv_row_bytes(kv_type, 3, 2, 32) == native_row_bytes(SPEC, kv_type)


def reference_order(memory, kv_type):
    """A native row as float32 ``[layer, k/v, position, kv_head, head_dim]``."""
    layers, heads, dim = SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim
    planes = np.frombuffer(memory, dtype=np.uint8).reshape(layers, 2, -1)
    scales = np.ones((layers, 2, heads, 16), dtype=np.float32)
    if kv_type == "int8":
        scales = np.ascontiguousarray(planes[:, :, -heads * 16 * 4 :]).view(np.float32).reshape(layers, 2, heads, 16)
        planes = planes[:, :, : -heads * 16 * 4]
    planes = np.ascontiguousarray(planes)
    if kv_type == "float32":
        k = planes[:, 0].copy().view(np.float32).reshape(layers, heads, dim, 16).transpose(0, 3, 1, 2)
        v = planes[:, 1].copy().view(np.float32).reshape(layers, heads, 16, dim).transpose(0, 2, 1, 3)
    else:
        if kv_type == "int8":
            values = planes.view(np.int8).astype(np.float32)
        else:
            values = (planes.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        k = values[:, 0].reshape(layers, heads, dim // 2, 16, 2).transpose(0, 3, 1, 2, 4).reshape(layers, 16, heads, dim)
        v = values[:, 1].reshape(layers, heads, 8, dim, 2).transpose(0, 2, 4, 1, 3).reshape(layers, 16, heads, dim)
    return np.stack([k, v], axis=1) * scales.transpose(0, 1, 3, 2)[..., None]


@needs_kernels
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_the_kernels_write_the_order_that_the_layout_names(kv_type):
    module = native.module()
    pool = NativeKvPool(SPEC, 4, kv_type)
    random = np.random.default_rng(2)
    k, v = (random.standard_normal((13, SPEC.num_kv_heads, SPEC.head_dim)).astype(np.float32) for _ in range(2))
    none = np.zeros(0, dtype=np.int64)
    paged = module.PagedAttention(
        kv_type,
        SPEC.num_layers,
        SPEC.num_kv_heads,
        SPEC.head_dim,
        pool.address,
        np.array([0, 13]),
        np.array([3]),
        np.array([[2]], dtype=np.int32),
        none,
        none,
        np.zeros(1, dtype=np.int64),
        none,
    )
    paged.write(module.Pool(1), 1, k, v)
    kept = reference_order(row(pool, 2), kv_type)
    assert not kept[[0, 2]].any()
    assert not kept[1, :, :3].any()
    tolerance = {"float32": 0.0, "bfloat16": 2.0**-8 * 4, "int8": 4 / 254}[kv_type]
    assert np.abs(kept[1, 0, 3:] - k).max() <= tolerance
    assert np.abs(kept[1, 1, 3:] - v).max() <= tolerance
    assert not any(row(pool, 3))


def test_what_kv_dtype_means():
    assert resolve_kv_type("auto", torch.bfloat16, "") == "bfloat16"
    assert resolve_kv_type("auto", torch.float16, "device cuda") == "float16"
    assert resolve_kv_type("int8", torch.bfloat16, "") == "int8"
    assert resolve_kv_type("bfloat16", torch.float32, "") == "bfloat16"
    assert resolve_kv_type("float32", torch.float32, "kernels = torch") == "float32"
    for setting in ("int8", "bfloat16"):
        with pytest.raises(ConfigError, match=r"kv_dtype = .*kernels = torch.*use kv_dtype = 'auto'"):
            resolve_kv_type(setting, torch.float32, "kernels = torch")
