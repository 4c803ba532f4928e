"""The native attention kernels: against float64, and bit for bit whatever shares the step. ``make test`` needs the compiled module."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from paged_world import Query, Run, World

from kvd.executor.kernels.cpu import native

pytestmark = [pytest.mark.torch, pytest.mark.skipif(native.status().isa is None, reason="kvd was installed without its native kernels")]

KV_TYPES = ("float32", "bfloat16", "int8")
TOLERANCES = {"float32": 3e-6, "bfloat16": 2e-2, "int8": 2e-2}
"""Largest error of outputs up to 4 or so: float32 sums, and probabilities (times V's scale) rounded to bfloat16 (2^-8 of the value)."""


@pytest.fixture(params=native.status().available_isas or ("none",))
def kernels(request: pytest.FixtureRequest) -> Any:
    """The module under each instruction set that this processor has."""
    module = native.module()
    before = module.isa()
    module.set_isa(request.param)
    yield module
    module.set_isa(before)


def alone(world: World, step: list[Query], **options: Any) -> np.ndarray:
    """Each query by itself, one token at a time, on one thread."""
    parts = [world.attend([Query(part.sequence, part.first + i)], **options) for part in step for i in range(part.num_tokens)]
    return np.concatenate(parts)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (3, 3, 96), (8, 1, 80), (20, 1, 16), (4, 2, 128), (2, 1, 256)]
)
def test_near_the_reference(kernels: Any, kv_type: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    world = World(
        kernels, (203, 17, 64, 1, 130), kv_type=kv_type, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, seed=head_dim
    )
    world.write(threads=2, chunk=37)
    step = [Query(3, 0), Query(1, 16), Query(4, 120, 10), Query(0, 150, 53), Query(2, 0, 64)]
    for window in (0, 1, 50, 64):
        difference = np.abs(world.attend(step, window=window, threads=2) - world.reference(step, window=window))
        assert difference.max() < TOLERANCES[kv_type], (window, difference.max())
        assert difference.mean() < TOLERANCES[kv_type] / 8, (window, difference.mean())


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_bfloat16_output_is_the_rounded_float32(kernels: Any, kv_type: str) -> None:
    world = World(kernels, (90,), kv_type=kv_type)
    world.write()
    step = [Query(0, 70, 20)]
    bits = world.attend(step, compute="bfloat16").astype(np.uint32) << 16
    exact = world.attend(step)
    assert np.abs(bits.view(np.float32) - exact).max() <= np.abs(exact).max() * 2.0**-8


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("window", [0, 100])
def test_bits_of_a_row_alone_batched_and_in_any_chunk(kernels: Any, kv_type: str, window: int) -> None:
    world = World(kernels, (401, 70, 128, 33, 250), kv_type=kv_type, seed=3)
    world.write()
    step = [Query(1, 69), Query(3, 32), Query(2, 100, 5), Query(4, 240, 10), Query(0, 330, 71)]
    want = alone(world, step, window=window)
    assert np.isfinite(want).all()
    for threads, plan_threads in itertools.product((1, 2), (1, 2, 64)):  # plans for many threads split contexts over tiles
        np.testing.assert_array_equal(world.attend(step, window=window, threads=threads, plan_threads=plan_threads), want)
    # other boundaries of the chunk
    for size in (1, 6, 64):
        pieces = [world.attend([Query(0, first, min(size, 401 - first))], window=window, plan_threads=8) for first in range(330, 401, size)]
        np.testing.assert_array_equal(np.concatenate(pieces), want[-71:])


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("window", [0, 150])
def test_bits_of_shared_runs_are_those_of_private_ones(kernels: Any, kv_type: str, window: int) -> None:
    """Two levels: all share 528 positions, the first four 784; one of them is a chunk."""
    lengths = (810, 800, 795, 790, 570, 550, 540)
    world = World(kernels, lengths, {i: (0, 784 if i < 4 else 528) for i in range(1, 7)}, kv_type=kv_type, seed=5)
    world.write()
    step = [Query(i, length - 1) for i, length in enumerate(lengths)]
    step[3] = Query(3, 785, 5)
    runs = [Run(0, 528, tuple(range(7))), Run(528, 784, (0, 1, 2, 3))]
    want = alone(world, step, window=window)
    assert np.isfinite(want).all()
    shared = 0
    for threads, plan_threads in ((1, 1), (2, 2), (2, 64)):
        for some in (runs, runs[:1], runs[1:]):
            np.testing.assert_array_equal(world.attend(step, window=window, runs=some, threads=threads, plan_threads=plan_threads), want)
            shared += world.num_shared_tasks
    assert shared, "no run was attended once"


def test_runs_that_are_not_worth_it_stay_private(kernels: Any) -> None:
    world = World(kernels, (230, 230), {1: (0, 208)})
    world.write()
    step = [Query(0, 229), Query(1, 229)]
    want = alone(world, step)
    for run in (Run(0, 48, (0, 1)), Run(16, 80, (0, 1))):  # less than a whole tile
        np.testing.assert_array_equal(world.attend(step, runs=[run], threads=2), want)
        assert world.num_shared_tasks == 0
    np.testing.assert_array_equal(world.attend(step, runs=[Run(0, 208, (0, 1))], threads=2, plan_threads=1), want)
    assert world.num_shared_tasks == 1


@pytest.mark.parametrize(("prefix", "length", "is_shared"), [(64, 2000, False), (192, 2000, False), (960, 1100, True)])
def test_a_short_prefix_of_long_contexts_stays_private(kernels: Any, prefix: int, length: int, is_shared: bool) -> None:
    """What a run saves must be more than the partials that every member's own tiles leave once it is cut."""
    world = World(kernels, (length,) * 6, dict.fromkeys(range(1, 6), (0, prefix)), seed=11)
    world.write()
    step = [Query(i, length - 1) for i in range(6)]
    got = world.attend(step, runs=[Run(0, prefix, tuple(range(6)))])
    assert (world.num_shared_tasks > 0) is is_shared
    np.testing.assert_array_equal(got, alone(world, step))


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_random_steps(kernels: Any, kv_type: str) -> None:
    """Random sequences, sharing, windows and threads: near float64 and bit-equal with the queries alone."""
    for seed in range(4):
        random = np.random.default_rng(seed)
        count = int(random.integers(2, 7))
        shared = int(random.integers(1, 20)) * 16
        lengths = tuple(shared + int(random.integers(1, 200)) for _ in range(count))
        num_kv_heads, group = int(random.integers(1, 4)), int(random.integers(1, 6))
        world = World(
            kernels,
            lengths,
            dict.fromkeys(range(1, count), (0, shared)),
            kv_type=kv_type,
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim=int(random.choice([16, 32, 48, 64, 80, 128])),
            seed=seed,
        )
        world.write(threads=2, chunk=int(random.integers(16, 100)))
        step = []
        for i, length in enumerate(lengths):
            first = int(random.integers(shared, length))
            step.append(Query(i, first, int(random.integers(1, length - first + 1)) if random.random() < 0.4 else 1))
        window = int(random.choice([0, 0, 70, 200]))
        got = world.attend(
            step, runs=[Run(0, shared, tuple(range(count)))], window=window, threads=2, plan_threads=int(random.integers(1, 9))
        )
        np.testing.assert_array_equal(got, alone(world, step, window=window))
        assert np.abs(got - world.reference(step, window=window)).max() < TOLERANCES[kv_type]


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["k", "v"])
def test_what_is_not_finite_is_seen_by_those_who_attend_to_it_alone(kernels: Any, kv_type: str, bad: float, part: str) -> None:
    world = World(kernels, (100, 100), kv_type=kv_type, num_heads=2, num_kv_heads=1)
    getattr(world, part)[0][50, 0, 7] = bad
    if part == "k":
        world.q[0][:, :, 7] = np.abs(world.q[0][:, :, 7])  # a score of minus infinity would be a position without weight
    world.write()
    got = world.attend([Query(0, 49), Query(0, 50), Query(0, 99), Query(1, 99)])
    finite = np.isfinite(got).all(axis=(1, 2))
    assert finite.tolist() == [True, False, False, True]


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("window", [0, 20])
def test_what_is_not_finite_reaches_no_other_row(kernels: Any, kv_type: str, window: int) -> None:
    """In a chunk a position that is not finite may reach queries of its own row that do not see it: the row fails in any case."""
    world = World(kernels, (200, 200), {1: (0, 64)}, kv_type=kv_type, num_heads=2, num_kv_heads=1)
    world.v[0][150, 0, 7] = np.nan
    world.write()
    step = [Query(0, 140, 40), Query(1, 140, 40)]
    for threads in (1, 8):
        got = world.attend(step, runs=[Run(0, 64, (0, 1))], window=window, plan_threads=threads)
        finite = np.isfinite(got).all(axis=(1, 2))
        assert not finite[10 : 10 + (window or 30)].any()
        np.testing.assert_array_equal(got[40:], alone(world, step[1:], window=window))


def test_int8_keeps_zeros_and_tiny_values(kernels: Any) -> None:
    world = World(kernels, (40,), kv_type="int8")
    for x in (*world.k, *world.v):
        x[3] = 0.0
        x[4] = 1e-42
    world.write()
    step = [Query(0, 0, 40)]
    assert np.abs(world.attend(step) - world.reference(step)).max() < TOLERANCES["int8"]


def test_refusals(kernels: Any) -> None:
    world = World(kernels, (20,))
    world.write()
    with pytest.raises(ValueError, match="float32, bfloat16 or int8"):
        kernels.kv_row_bytes("float16", 1, 1, 64)
    with pytest.raises(ValueError, match="num_heads is a multiple"):
        world.paged([Query(0, 3)]).plan(3, 0, 1)
    with pytest.raises(IndexError, match="layer"):
        world.paged([Query(0, 3)]).write(kernels.Pool(1), 2, world.k[0][:1], world.v[0][:1])
    with pytest.raises(ValueError, match="num_tokens"):
        world.paged([Query(0, 3)]).write(kernels.Pool(1), 0, world.k[0][:2], world.v[0][:2])
