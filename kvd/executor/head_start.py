"""What needs no torch begins before torch is imported: packing the weights and touching the pool's pages leave the interpreter alone, which the import holds.

Here is guessed what ``assemble`` decides; where the guess was wrong, the work is given up and done again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.config import CacheConfig, ConfigError, ModelConfig
from kvd.executor.host_memory import automatic_pool_bytes, check_pool_fits
from kvd.executor.kernels.cpu import native
from kvd.executor.models.spec import ModelSpec
from kvd.executor.pool_memory import PoolMemory

if TYPE_CHECKING:
    from kvd.executor.models.weights.native import NativeWeights

_ACCELERATORS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Device files of which torch's CUDA needs one."""

Progress = Callable[[int, int], None]


class _UnwantedError(Exception):
    """Ends loading what nobody will take."""


@dataclass(frozen=True, slots=True)
class _Choice:
    dtype: str
    quantised: bool
    num_threads: int


class EarlyWeights:
    """``load_native`` on a thread of its own."""

    def __init__(self, path: Path, spec: ModelSpec, choice: _Choice) -> None:
        self._path = path
        self._spec = spec
        self._choice = choice
        self._listener: Progress | None = None
        self._read = (0, 0)
        self._weights: NativeWeights | None = None
        self._error: BaseException | None = None
        self._is_wanted = True
        self.was_taken = False
        self.loaded_s = 0.0
        """How long loading took, once it is over."""
        self._thread = threading.Thread(target=self._run, name="kvd-early-weights", daemon=True)
        self._thread.start()

    @property
    def is_loading(self) -> bool:
        return self._thread.is_alive()

    def take(self, *, dtype: str, quantised: bool, num_threads: int, progress: Progress) -> NativeWeights | None:
        """The weights, when they are there; None, and nothing is kept of them, if others are wanted. Errors are those of ``load_native``."""
        if self._choice != _Choice(dtype, quantised, num_threads):
            self.discard()
            return None
        self._listener = progress
        self.was_taken = True
        self._thread.join()
        if self._error is not None:
            raise self._error
        progress(*self._read)  # nobody listened while they were read
        weights, self._weights = self._weights, None
        return weights

    def discard(self) -> None:
        """Nobody will take them: loading ends with the tensor that it is at, and their memory goes."""
        self._is_wanted = False  # first: ``_run`` looks at it after it has kept them
        self._weights = None

    def _run(self) -> None:
        choice = self._choice
        begun_s = time.monotonic()
        try:
            from kvd.executor.models.weights.native import load_native

            self._weights = load_native(
                self._path,
                self._spec,
                dtype=choice.dtype,
                pool=native.pool(choice.num_threads),
                quantised=choice.quantised,
                progress=self._tell,
            )
            if not self._is_wanted:
                self._weights = None
        except _UnwantedError:
            pass
        except BaseException as error:  # handed to the thread that takes
            self._error = error
        self.loaded_s = time.monotonic() - begun_s

    def _tell(self, done: int, total: int) -> None:
        if not self._is_wanted:
            raise _UnwantedError
        self._read = (done, total)
        if self._listener is not None:
            self._listener(done, total)


@dataclass(frozen=True, slots=True)
class HeadStart:
    """What was begun; each None where it was not."""

    weights: EarlyWeights | None = None
    memory: PoolMemory | None = None

    @property
    def is_running(self) -> bool:
        """Whether a thread of it runs: then the process must not end in the interpreter's own way."""
        return (self.weights is not None and self.weights.is_loading) or (self.memory is not None and self.memory.is_touching)

    def discard(self) -> None:
        """Nobody will take the weights any more."""
        if self.weights is not None:
            self.weights.discard()


def begin(path: Path, spec: ModelSpec, model: ModelConfig, cache: CacheConfig, *, num_threads: int) -> HeadStart:
    """Begin what will most likely be needed. Never fails: what is wrong is found and said where it is decided."""
    if model.device not in ("auto", "cpu") or (model.device == "auto" and any(file.exists() for file in _ACCELERATORS)):
        return HeadStart()
    memory = _memory(cache.kv_memory)
    if model.kernels == "torch" or spec.weights_format != "gguf" or native.why_not(spec.head_dim, cache.block_size_tokens):
        return HeadStart(memory=memory)
    dtype = ("bfloat16" if "avx512" in native.status().available_isas else "float32") if model.dtype == "auto" else model.dtype
    if dtype not in ("float32", "bfloat16"):
        return HeadStart(memory=memory)
    from kvd.executor.models.weights.native import keeps_quantised

    return HeadStart(EarlyWeights(path, spec, _Choice(dtype, keeps_quantised(spec, model.weights), num_threads)), memory)


def _memory(configured: int) -> PoolMemory | None:
    try:
        if configured:
            check_pool_fits(configured)
        return PoolMemory(configured or automatic_pool_bytes())
    except (ConfigError, OSError):
        return None
