"""Sequences in a block-major pool in the kernels' order, their attention by the native kernels, and the same by float64 numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BLOCK = 16


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 (nearest, ties to even), as float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 codes and float32 scales over the last axis."""
    largest = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127) / largest
    inverse[np.isinf(inverse)] = 0.0
    return np.rint(x * inverse).astype(np.int8), (largest / np.float32(127))[..., 0]


def as_kept(x: np.ndarray, kv_type: str) -> np.ndarray:
    """What the pool gives back of float32 values, in float64."""
    if kv_type == "int8":
        codes, scales = quantised(x)
        return codes.astype(np.float64) * scales[..., None]
    return (to_bfloat16(x) if kv_type == "bfloat16" else x).astype(np.float64)


@dataclass(frozen=True)
class Query:
    """``num_tokens`` queries of one sequence, the first at position ``first``."""

    sequence: int
    first: int
    num_tokens: int = 1


@dataclass(frozen=True)
class Run:
    """Positions ``start:end`` are the same blocks in the queries ``queries`` (indices into the step)."""

    start: int
    end: int
    queries: tuple[int, ...]


@dataclass
class World:
    """Sequences of given lengths; ``shares[i] = (j, n)``: the first n positions of sequence i are those of sequence j < i."""

    native: Any
    lengths: Sequence[int]
    shares: dict[int, tuple[int, int]] = field(default_factory=dict)
    kv_type: str = "bfloat16"
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    num_layers: int = 2
    layer: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.row_bytes = self.native.kv_row_bytes(self.kv_type, self.num_layers, self.num_kv_heads, self.head_dim)
        num_blocks = [-(-length // BLOCK) for length in self.lengths]
        free = list(random.permutation(sum(num_blocks) + 3))
        self.tables = np.zeros((len(self.lengths), max(num_blocks)), dtype=np.int32)
        self.k: list[np.ndarray] = []
        self.v: list[np.ndarray] = []
        self.q: list[np.ndarray] = []
        for i, length in enumerate(self.lengths):
            other, shared = self.shares.get(i, (0, 0))
            k, v = (random.standard_normal((length, self.num_kv_heads, self.head_dim)).astype(np.float32) for _ in range(2))
            self.tables[i, : num_blocks[i]] = [free.pop() for _ in range(num_blocks[i])]
            if shared:
                k[:shared], v[:shared] = self.k[other][:shared], self.v[other][:shared]
                self.tables[i, : shared // BLOCK] = self.tables[other, : shared // BLOCK]
            self.k.append(k)
            self.v.append(v)
            self.q.append(random.standard_normal((length, self.num_heads, self.head_dim)).astype(np.float32))
        # what no position has been written to holds NaN: it must reach nobody
        self.pool = np.full(((sum(num_blocks) + 3) * self.row_bytes) + 64, 0xFF, dtype=np.uint8)
        self.address = self.pool.ctypes.data + -self.pool.ctypes.data % 64
        self.scale = self.head_dim**-0.5

    def write(self, threads: int = 1, chunk: int = 1 << 30) -> None:
        """Every position of every sequence, in steps of up to ``chunk`` positions a sequence."""
        for first in range(0, max(self.lengths), chunk):
            step = [Query(i, first, min(chunk, length - first)) for i, length in enumerate(self.lengths) if length > first]
            k, v = (np.concatenate([x[q.sequence][q.first : q.first + q.num_tokens] for q in step]) for x in (self.k, self.v))
            self.paged(step).write(self.native.Pool(threads), self.layer, k, v)

    def paged(self, step: Sequence[Query], runs: Sequence[Run] = ()) -> Any:
        """The binding's object for a step."""
        counts = [q.num_tokens for q in step]
        members = [np.asarray(run.queries, dtype=np.int64) for run in runs]
        return self.native.PagedAttention(
            self.kv_type,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.address,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.array([q.first for q in step], dtype=np.int64),
            np.ascontiguousarray(self.tables[[q.sequence for q in step]]),
            np.array([run.start for run in runs], dtype=np.int64),
            np.array([run.end for run in runs], dtype=np.int64),
            np.concatenate([[0], np.cumsum([len(m) for m in members])]).astype(np.int64),
            np.concatenate([*members, np.zeros(0, dtype=np.int64)]).astype(np.int64),
        )

    def attend(
        self,
        step: Sequence[Query],
        *,
        runs: Sequence[Run] = (),
        window: int = 0,
        threads: int = 1,
        plan_threads: int = 0,
        compute: str = "float32",
    ) -> np.ndarray:
        """``[tokens, num_heads, head_dim]`` float32 (or the bits of bfloat16), the step's queries one after the other."""
        paged = self.paged(step, runs)
        q = np.concatenate([self.q[part.sequence][part.first : part.first + part.num_tokens] for part in step])
        out = np.empty(q.shape, dtype=np.float32 if compute == "float32" else np.uint16)
        plan = paged.plan(self.num_heads, window, plan_threads or threads)
        self.num_shared_tasks = plan.num_shared_tasks
        pool = self.native.Pool(threads)
        for _ in range(2):  # a plan serves every layer with its window
            out.fill(0)
            paged.attend(pool, plan, self.layer, self.scale, q, compute, out)
        return out

    def reference(self, step: Sequence[Query], *, window: int = 0) -> np.ndarray:
        """The same in float64, from what the pool keeps of K and V."""
        parts = []
        group = self.num_heads // self.num_kv_heads
        for part in step:
            q = self.q[part.sequence][part.first : part.first + part.num_tokens]
            end = part.first + part.num_tokens
            k, v = (np.repeat(as_kept(x[part.sequence][:end], self.kv_type), group, axis=1) for x in (self.k, self.v))
            queries = (q if self.kv_type == "float32" else to_bfloat16(q)).astype(np.float64)
            scores = np.einsum("thd,phd->htp", queries, k) * self.scale
            distance = np.arange(part.first, end)[:, None] - np.arange(end)[None, :]
            scores[:, (distance < 0) | (distance >= (window or 1 << 40))] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            parts.append(np.einsum("htp,phd->thd", weights / weights.sum(axis=-1, keepdims=True), v))
        return np.concatenate(parts)
