"""Small arrays to the device and back without waiting for it: one transfer each way, through pinned memory.

``Tensor.to`` from pageable memory waits for everything that the stream has in hand; that would end the second step in flight. torch's allocator of pinned
memory keeps what a transfer still reads, so that a buffer may be dropped as soon as it is under way. On a CPU the same calls are plain copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_ALIGN_WORDS = 4
"""Arrays begin at multiples of 16 bytes: Triton makes another kernel for a pointer that does not."""

_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


class Fence(Protocol):
    """A point in a device's work."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Past:
    """The fence of work that was done when it was handed over."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class EventFence:
    """What was handed to ``stream`` so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays (int32, int64, float32) on the device, in order of the stream that is current."""
    starts, num_words = layout([array.nbytes // 4 for array in arrays.values()])
    host = torch.empty(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
    words = host.numpy()
    for start, array in zip(starts, arrays.values(), strict=True):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.int32)
        words[start : start + len(flat)] = flat
    memory = host.to(device, non_blocking=True)
    return {
        name: memory[start : start + array.nbytes // 4].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for (name, array), start in zip(arrays.items(), starts, strict=True)
    }


def layout(sizes_words: Sequence[int]) -> tuple[list[int], int]:
    """Where arrays of so many 4-byte words begin in one run of memory, and its length."""
    starts = []
    end = 0
    for size in sizes_words:
        starts.append(end)
        end += -(-size // _ALIGN_WORDS) * _ALIGN_WORDS
    return starts, end


@dataclass(frozen=True, slots=True)
class Download:
    """Host copies of some tensors, theirs once ``fence`` is done."""

    tensors: tuple[Tensor, ...]
    fence: Fence


def download(*tensors: Tensor) -> Download:
    """Begin to copy the tensors, all on one device, to the host."""
    device = tensors[0].device
    if device.type != "cuda":
        return Download(tuple(tensor.clone() for tensor in tensors), Past())
    copies = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    return Download(copies, EventFence(torch.cuda.current_stream(device)))
