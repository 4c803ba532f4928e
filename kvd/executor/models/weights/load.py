"""From files to a Decoder: every tensor is checked first, then converted one by one into its slice of the fused weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from kvd.executor.models.decoder import Decoder, DecoderWeights, allocate_weights
from kvd.executor.models.spec import ModelError, ModelSpec
from kvd.executor.models.weights.plan import Assignment, assign, check_names
from kvd.executor.models.weights.source import open_source

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Torch's dtypes by the names that configuration and fingerprint use."""


def load_decoder(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Read the weights at ``path`` into a decoder for ``spec`` (of ``inspect_model``, then ``fit_length``).

    Needs memory for the weights in ``dtype`` and for one run of rows besides. ``progress`` gets the bytes of the files read so far and in all,
    after each tensor.

    Raises:
        ModelError: ``dtype`` is not one that the device computes in.
        UnsupportedModelError: weights in a format or a storage type that is not read.
        WeightsError: a tensor is missing, unexpected, of a wrong shape, or a file is damaged; the message names it.
    """
    device = torch.device(device)
    check_dtype(dtype, device)
    source = open_source(path, spec)
    weights = allocate_weights(spec, dtype=dtype, device=device)
    plan = assign(spec)
    check_names(plan, source.shapes, source.ignored, source.origin)
    total = sum(source.sizes_bytes[item.name] for item in plan)
    done = 0
    for item in plan:
        _fill(_target(weights, item), item, source.read(item.name), spec.head_dim)
        done += source.sizes_bytes[item.name]
        if progress is not None:
            progress(done, total)
    return Decoder(spec, weights)


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises:
    ModelError: float16 on the CPU, or a dtype that is none of float32, bfloat16 and float16.
    """
    if dtype not in DTYPES.values():
        raise ModelError(f"dtype {str(dtype).removeprefix('torch.')} is not supported; supported: {', '.join(DTYPES)}")
    if dtype is torch.float16 and device.type == "cpu":
        raise ModelError("dtype float16 is for cuda only; on cpu use bfloat16 or float32")


def _target(weights: DecoderWeights, item: Assignment) -> Tensor:
    tensor: Tensor = getattr(weights if item.layer is None else weights.layers[item.layer], item.part)
    return tensor[item.first_row : item.first_row + item.num_rows]


def _fill(target: Tensor, item: Assignment, runs: Iterator[Tensor], head_dim: int) -> None:
    if len(item.shape) == 1:
        target.copy_(next(runs))
        return
    start = 0
    for run in runs:
        rows = _halves_apart(run, head_dim) if item.interleaved else run
        target[start : start + rows.shape[0]].copy_(rows)
        start += rows.shape[0]


def _halves_apart(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from (pair, half) to (half, pair)."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)
