"""LoRA adapters packed for the native kernels, which add them to a step's products row by row (kernels/cpu/adapter.h)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.executor.adapters import Adapter
from kvd.executor.kernels.cpu import native
from kvd.executor.models.weights.native import PLAIN
from kvd.executor.row_adapters import by_product, tensor_values


def pack_adapter(adapter: Adapter, decoder: Any, dtype: str) -> Any:
    """The adapter as ``decoder`` takes it: A in the decoder's ``dtype``, B times the scale in float32.

    Raises:
        AdapterError: a value is not finite.
    """
    module, threads = native.module(), native.pool()
    packed = module.Adapter(decoder)
    for (layer, part), pieces in by_product(adapter.modules).items():
        inputs = pieces[0].a.shape[1]
        down = module.Matrix(PLAIN[dtype], sum(piece.rank for piece in pieces), inputs)
        up, first_rank = [], 0
        for piece in pieces:
            what = f"adapter {adapter.name}: a tensor of layer {layer}"
            down.pack_rows(threads, first_rank, np.ascontiguousarray(tensor_values(piece.a, what, dtype=dtype)))
            matrix = module.Matrix("f32", piece.num_rows, piece.rank)
            matrix.pack_rows(threads, 0, np.ascontiguousarray(tensor_values(piece.b, what, scale=piece.scale)))
            up.append((piece.first_row, first_rank, matrix))
            first_rank += piece.rank
        packed.set(decoder, layer, part, down, up)
    return packed
