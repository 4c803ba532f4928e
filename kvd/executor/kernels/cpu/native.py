"""Whether the native kernels are there, which instruction set they use, and the one pool of threads of this process.

``KVD_CPU_ISA`` (portable, avx2 or avx512) makes the kernels use a lower instruction set than the processor has: for tests and comparisons.
"""

from __future__ import annotations

import importlib
import os
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvd.executor.host_cores import compute_threads

ISA_VARIABLE = "KVD_CPU_ISA"
INSTRUCTION_SETS = ("portable", "avx2", "avx512")
BLOCK_SIZE_TOKENS = 16
"""Positions of a block as the kernels read it."""
_HEAD_DIM_STEP = 16
_MAX_HEAD_DIM = 256


class NativeKernelsError(RuntimeError):
    """The native kernels are not there, or not as the environment wants them."""


@dataclass(frozen=True, slots=True)
class Status:
    """What ``kvd doctor`` tells of the native kernels: an instruction set, or why there is none."""

    isa: str | None
    available_isas: tuple[str, ...]
    reason: str


@cache
def _module() -> tuple[Any, str]:
    """The compiled module, or None and why."""
    try:
        module = importlib.import_module("kvd.executor.kernels.cpu._cpu")
    except ModuleNotFoundError:
        return (
            None,
            "kvd was installed without them: there was no C++ compiler, or it failed (reinstall with g++ 12 or newer and cmake 3.22 at hand)",
        )
    except ImportError as error:
        return None, f"they don't load: {error}"
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted:
        try:
            module.set_isa(wanted)
        except ValueError as error:
            return None, f"{ISA_VARIABLE}={wanted}: {error}; have {', '.join(module.available_isas())}"
    return module, ""


def status() -> Status:
    """What is there; never raises."""
    module, reason = _module()
    if module is None:
        return Status(None, (), reason)
    return Status(module.isa(), tuple(module.available_isas()), "")


def module() -> Any:
    """The compiled module; ``NativeKernelsError`` says why it is not there."""
    found, reason = _module()
    if found is None:
        raise NativeKernelsError(f"native CPU kernels: {reason}")
    return found


def why_not(head_dim: int | None, block_size_tokens: int) -> str:
    """Why the kernels don't serve a model of this ``head_dim`` (None: no model at all) in blocks of so many positions; empty where they do."""
    if block_size_tokens != BLOCK_SIZE_TOKENS:
        return f"block_size_tokens = {block_size_tokens}; they read blocks of {BLOCK_SIZE_TOKENS}"
    if head_dim is not None and (head_dim % _HEAD_DIM_STEP or head_dim > _MAX_HEAD_DIM):
        return f"the model's head_dim is {head_dim}; they take multiples of {_HEAD_DIM_STEP} up to {_MAX_HEAD_DIM}"
    return status().reason


_pools: dict[int, Any] = {}
_pools_lock = threading.Lock()  # weights may be packed on a thread of their own


def _after_fork() -> None:
    """The pool's threads stayed with the parent: the child makes a pool of its own. (What holds the parent's computes on the calling thread.)"""
    global _pools_lock  # noqa: PLW0603  the parent may hold it
    _pools_lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_after_fork)


def pool(num_threads: int | None = None) -> Any:
    """The process's pool of ``num_threads`` (the caller counts; None: those of the pool that is there, else ``compute_threads(0)``)."""
    with _pools_lock:
        if num_threads is None:
            num_threads = next(iter(_pools), compute_threads(0))
        if num_threads not in _pools:
            made = module().Pool(num_threads)
            _pools.clear()
            _pools[num_threads] = made
        return _pools[num_threads]
