"""SwiGLU's activation (Shazeer 2020): SiLU of the gate times the other half."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional


@triton.jit
def _silu_mul(gate_up, out, size, WIDTH: tl.constexpr):
    """One program for ``WIDTH`` columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``gate_up [T, 2 * size]``, contiguous, gate first -> ``[T, size]`` in the same dtype; computed in float32 and rounded once."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    width = min(1024, triton.next_power_of_2(size))
    _silu_mul[(num_rows, triton.cdiv(size, width))](gate_up, out, size, WIDTH=width)
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The same in torch's own operations."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)
