"""Whether the native kernels are there, which instruction set they use, and the one pool of threads of this process.

``KVD_CPU_ISA`` (portable, avx2 or avx512) makes the kernels use a lower instruction set than the processor has: for tests and comparisons.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

ISA_VARIABLE = "KVD_CPU_ISA"


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


def num_usable_cores() -> int:
    """Cores that this process may run on: its affinity, not the machine's size."""
    return len(os.sched_getaffinity(0))


_pools: dict[int, Any] = {}


def pool(num_threads: int | None = None) -> Any:
    """The process's pool of ``num_threads`` (the caller counts; None: those of the pool that is there, else the usable cores)."""
    if num_threads is None:
        num_threads = next(iter(_pools), num_usable_cores())
    if num_threads not in _pools:
        made = module().Pool(num_threads)
        _pools.clear()
        _pools[num_threads] = made
    return _pools[num_threads]
