"""Which kernels compute a model: kvd's own on the CPU, or torch's."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Protocol

import torch

from kvd.config import ConfigError
from kvd.executor.kernels.cpu import native

_NUMBERS_VERSION = 1
"""Raised whenever the native kernels' sums change their order, so that blocks of before are not taken for blocks of now."""


class HeadShape(Protocol):
    """The part of a model's spec that the choice looks at."""

    @property
    def head_dim(self) -> int: ...


def why_torch(setting: str, spec: HeadShape | None, device: torch.device, dtype: torch.dtype, block_size_tokens: int) -> str:
    """Why the native kernels don't serve ``spec`` here; empty where they do. ``setting`` is ``ModelConfig.kernels``; without a ``spec``,
    why they serve no model at all.

    Raises:
        ConfigError: ``native`` was asked for, and they can't; or the environment names an instruction set that is none.
    """
    if setting == "torch":
        return "kernels = torch"
    isa = os.environ.get(native.ISA_VARIABLE, "")
    if isa and isa not in native.INSTRUCTION_SETS:
        raise ConfigError(f"{native.ISA_VARIABLE}={isa} in the environment: give one of {', '.join(native.INSTRUCTION_SETS)}")
    if device.type != "cpu":
        reason = f"device {device}"
    elif dtype not in (torch.float32, torch.bfloat16):
        reason = f"dtype {str(dtype).removeprefix('torch.')}; they compute float32 and bfloat16"
    else:
        reason = native.why_not(None if spec is None else spec.head_dim, block_size_tokens)
    if reason and setting == "native":
        raise ConfigError(f"kernels = 'native': {reason}")
    return reason


def has_gpu_kernels(setting: str, device: torch.device) -> bool:
    """Whether kvd's Triton kernels compute on ``device``: on cuda, where torch brings Triton, unless ``kernels`` is ``torch``."""
    return device.type == "cuda" and setting != "torch" and find_spec("triton") is not None


GPU_KERNEL_FAMILY = f"triton-cuda-v{_NUMBERS_VERSION}"


def kernel_family(*, quantised: bool) -> str:
    """Of the native kernels: what the bits of keys and values depend on besides the fingerprint's other fields."""
    return f"cpu-{native.status().isa}-v{_NUMBERS_VERSION}{'-quantised' if quantised else ''}"
