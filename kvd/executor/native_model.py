"""The model on kvd's own CPU kernels: a step is one call that leaves Python alone between the token ids and the hidden states.

It computes what ``kvd.executor.models.decoder`` computes, from packed weights and a pool in the kernels' own order. A row's numbers never depend
on the rows beside it, nor on how its prompt was cut into chunks (docs/architecture.md, "Equality").
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvd.executor.head_start import EarlyWeights
from kvd.executor.input_batch import StepRows
from kvd.executor.kernels.cpu import native
from kvd.executor.models.rope import inverse_frequencies, rotation
from kvd.executor.models.spec import ModelSpec
from kvd.executor.models.weights.native import NativeWeights, load_native
from kvd.executor.native_kv_pool import NativeKvPool
from kvd.executor.step_model import StepHidden


def load_native_decoder(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    quantised: bool,
    threads: int,
    max_model_len: int,
    max_step_tokens: int,
    progress: Callable[[int, int], None],
    early: EarlyWeights | None = None,
) -> Any:
    """Read the weights at ``path`` into a native decoder over the process's pool of ``threads`` threads; errors are those of ``load_native``.

    They are taken from ``early`` if these are the ones.
    """
    pool = native.pool(threads)
    name = str(dtype).removeprefix("torch.")
    weights = early.take(dtype=name, quantised=quantised, num_threads=threads, progress=progress) if early is not None else None
    if weights is None:
        weights = load_native(path, spec, dtype=name, pool=pool, quantised=quantised, progress=progress)
    return build_decoder(spec, weights, pool, dtype=dtype, max_model_len=max_model_len, max_step_tokens=max_step_tokens)


def build_decoder(
    spec: ModelSpec, weights: NativeWeights, pool: Any, *, dtype: torch.dtype, max_model_len: int, max_step_tokens: int
) -> Any:
    """The native decoder over packed ``weights``. ``pool`` is the pool of threads; memory for steps of ``max_step_tokens`` is touched here."""
    positions = torch.arange(max_model_len)
    cosines, sines = rotation(inverse_frequencies(spec.rope, spec.head_dim), positions, spec.rope.attention_factor, torch.float32)
    decoder = native.module().Decoder(
        pool=pool,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        eps=spec.rms_norm_eps,
        attention_scale=spec.attention_scale,
        compute=str(dtype).removeprefix("torch."),
        embedding=weights.embedding,
        head=[weights.head],
        final_norm=weights.final_norm,
        cosines=cosines.squeeze(1).contiguous().numpy(),
        sines=sines.squeeze(1).contiguous().numpy(),
    )
    for window, layer in zip(spec.windows, weights.layers, strict=True):
        decoder.add_layer(
            window=window,
            attention_norm=layer.attention_norm,
            qkv=list(layer.qkv),
            qkv_bias=layer.qkv_bias,
            qk_norm=layer.qk_norm,
            output=[layer.output],
            feed_forward_norm=layer.feed_forward_norm,
            gate_up=list(layer.gate_up),
            down=[layer.down],
        )
    decoder.reserve(max_step_tokens)
    return decoder


def step_arrays(rows: StepRows) -> tuple[np.ndarray, ...]:
    """A step as the kernels take it, in their order."""
    attention = rows.attention
    return (
        rows.token_ids,
        attention.positions,
        attention.starts,
        attention.num_computed,
        attention.block_tables,
        attention.run_start,
        attention.run_end,
        attention.run_offsets,
        attention.run_rows,
    )


def adapter_arguments(rows: StepRows) -> tuple[Any, ...]:
    """The last arguments of a step, for the kernels: nothing where no row has an adapter."""
    return () if rows.adapters is None else (rows.adapters.adapters, rows.adapters.of_rows)


class _Room:
    """Memory for logits, grown as needed. Models over one decoder share it: one of them computes at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._logits = torch.empty((0, vocab_size), dtype=torch.float32)

    def of(self, num_rows: int) -> Tensor:
        """Float32 ``[num_rows, vocab_size]``; the last one is no longer valid."""
        if len(self._logits) < num_rows:
            self._logits = torch.empty((num_rows, self._logits.shape[1]), dtype=torch.float32)
        return self._logits[:num_rows]


class NativeModel:
    """A native decoder over one pool."""

    warm_up_prompts = (1, 64)
    """Nothing is compiled: one prompt of more rows than a product computes undivided (``MANY_ROWS`` of the module), and one token."""
    warm_up_rows = 16
    """For the memory of sampling; no code depends on how many rows decode."""

    def __init__(self, decoder: Any, pool: NativeKvPool, room: _Room | None = None) -> None:
        self._decoder = decoder
        self._pool = pool
        self._room = room or _Room(decoder.vocab_size)

    @property
    def decoder(self) -> Any:
        """The native decoder."""
        return self._decoder

    def over(self, pool: NativeKvPool) -> NativeModel:
        return NativeModel(self._decoder, pool, self._room)

    def forward(self, rows: StepRows) -> StepHidden:
        finite = np.empty(len(rows.token_ids), dtype=bool)
        self._decoder.forward(
            self._pool.address,
            self._pool.kv_type,
            self._pool.num_blocks,
            *step_arrays(rows),
            finite,
            *adapter_arguments(rows),
        )
        return _NativeHidden(self, finite)

    def hidden(self) -> StepHidden:
        """Of the last step that the decoder ran, by whomever; all of it finite, as far as is known here."""
        return _NativeHidden(self, np.ones(0, dtype=bool))

    def logits(self, tokens: np.ndarray) -> Tensor:
        """``StepHidden.logits`` of the last step, in memory that the next call takes again."""
        logits = self._room.of(len(tokens))
        self._decoder.logits(tokens, logits.data_ptr())
        return logits

    def greedy(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``StepHidden.greedy`` of the last step."""
        token_ids, finite = np.empty(len(tokens), dtype=np.int64), np.empty(len(tokens), dtype=bool)
        self._decoder.greedy(tokens, self._room.of(len(tokens)).data_ptr(), token_ids, finite)
        return token_ids, finite


class _NativeHidden:
    def __init__(self, model: NativeModel, finite: np.ndarray) -> None:
        self._finite = finite
        self.logits = model.logits
        self.greedy = model.greedy

    def finite(self) -> np.ndarray:
        return self._finite
