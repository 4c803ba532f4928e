"""The pool: rows are plain bytes, copied exactly, whatever the dtype."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

from dataclasses import dataclass  # noqa: E402

import torch  # noqa: E402

from kvd.executor.kv_pool import KvPool, row_bytes  # noqa: E402


@dataclass(frozen=True)
class Shape:
    num_layers: int = 3
    num_kv_heads: int = 2
    head_dim: int = 8


SPEC = Shape()


def random_pool(dtype, num_blocks=10):
    pool = KvPool(SPEC, num_blocks, 4, dtype, "cpu")
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (num_blocks * pool.row_bytes,), dtype=torch.uint8, generator=generator)  # NaN patterns included
    pool.write_blocks(range(num_blocks), memoryview(noise.numpy()))
    return pool, noise.numpy().tobytes()


def dump(pool, ids):
    memory = bytearray(len(ids) * pool.row_bytes)
    pool.read_blocks(ids, memoryview(memory))
    return bytes(memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_go_out_and_in_byte_for_byte(dtype):
    pool, content = random_pool(dtype)
    assert pool.row_bytes == row_bytes(SPEC, dtype, 4) == 3 * 2 * 4 * 2 * 8 * dtype.itemsize
    size = pool.row_bytes
    assert dump(pool, [3, 0, 9]) == content[3 * size : 4 * size] + content[:size] + content[9 * size :]
    other = KvPool(SPEC, 12, 4, dtype, "cpu")
    other.write_blocks([11, 2, 5], memoryview(dump(pool, [3, 0, 9])))  # bytes: memory that can't be written
    assert dump(other, [2, 5, 11]) == content[:size] + content[9 * size :] + content[3 * size : 4 * size]
    assert dump(other, [0, 1, 3]) == bytes(3 * size)


def test_a_row_is_layer_kv_position_head_dimension():
    pool = KvPool(SPEC, 4, 4, torch.float32, "cpu")
    block, layer, kv, position = 2, 1, 1, 3
    plane = (block * SPEC.num_layers + layer) * 2 + kv
    pool.positions[plane * 4 + position] = torch.arange(16.0)
    row = torch.frombuffer(bytearray(dump(pool, [block])), dtype=torch.float32).view(3, 2, 4, 2, 8)
    assert torch.equal(row[layer, kv, position].flatten(), torch.arange(16.0))
    assert int(row.count_nonzero()) == 15
    assert torch.equal(pool.planes[plane].view(4, 16)[position], torch.arange(16.0))


def test_copies_read_every_source_before_they_write():
    pool, content = random_pool(torch.bfloat16)
    size = pool.row_bytes
    pool.copy_blocks([0, 1, 0], [1, 2, 7])
    assert dump(pool, [0, 1, 2, 7]) == content[:size] * 2 + content[size : 2 * size] + content[:size]
    assert dump(pool, [3, 4]) == content[3 * size : 5 * size]
    pool.copy_blocks([], [])


def test_clearing_reaches_whole_blocks_and_no_others():
    pool, content = random_pool(torch.bfloat16)
    size = pool.row_bytes
    pool.clear_blocks(pool._checked([4, 6]))
    assert dump(pool, [4, 5, 6]) == bytes(size) + content[5 * size : 6 * size] + bytes(size)


@pytest.mark.parametrize("ids", [[10], [-1], [0, 11]])
def test_blocks_outside_the_pool_are_refused(ids):
    pool, content = random_pool(torch.float32)
    memory = memoryview(bytearray(len(ids) * pool.row_bytes))
    for action in (lambda: pool.read_blocks(ids, memory), lambda: pool.write_blocks(ids, memory), lambda: pool.copy_blocks(ids, ids)):
        with pytest.raises(IndexError, match="pool of 10"):
            action()
    assert dump(pool, range(10)) == content
