"""RMSNorm, with the addition to the residual stream that comes before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_and_norm(residual, update, weight, out, size, eps, HAS_UPDATE: tl.constexpr, WIDTH: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < size
    values = tl.load(residual + row * size + column, mask=inside, other=0.0)
    if HAS_UPDATE:
        values += tl.load(update + row * size + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * size + column, values, mask=inside)
    normal = values * tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    # rounded before it is scaled, as the reference does
    rounded = normal.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + column, (scale * rounded).to(out.dtype.element_ty), mask=inside)


def add_and_norm(residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """``residual += update``, then RMSNorm (Zhang and Sennrich 2019) of its rows, in the dtype of ``weight``.

    ``residual`` float32 ``[T, size]``, changed in place; ``update [T, size]`` of any dtype; all contiguous.
    """
    num_rows, size = residual.shape
    out = torch.empty(residual.shape, dtype=weight.dtype, device=residual.device)
    width = triton.next_power_of_2(size)
    _add_and_norm[(num_rows,)](
        residual,
        residual if update is None else update,
        weight,
        out,
        size,
        eps,
        HAS_UPDATE=update is not None,
        WIDTH=width,
        num_warps=8 if width >= 4096 else 4,
    )
    return out


def add_and_norm_reference(residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The same in torch's own operations."""
    if update is not None:
        residual += update.float()
    normal = residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(weight.dtype)
