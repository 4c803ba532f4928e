"""Decoding as captured graphs, one for each of some numbers of rows: a step is one copy of its inputs and one launch.

A captured launch reads its inputs where they lay at capture and has the grid that it had. So every graph has static input memory, sized for its number of rows and for as much other
work as is usual; a step takes the smallest graph that holds it, and the rows that it has too few of are padding, which the work must make nothing of (position -1). A step
that no graph holds runs without one. What captures is a port: CUDA graphs on a GPU; where nothing can be captured, running the work again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvd.executor.gpu.transfer import layout

Work = Callable[[Mapping[str, Tensor]], Tensor]
"""From inputs to one output. It must do the same whatever the inputs hold: no look at them on the host."""


@dataclass(frozen=True, slots=True)
class Field:
    """An int32 input of static memory, and what stands where a step gives nothing; None: nobody looks there."""

    shape: tuple[int, ...]
    padding: int | None


class GraphMaker(Protocol):
    """Captures work."""

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Do ``work`` once or more; its output's place, and what brings the output there anew."""


class CudaGraphs:
    """CUDA's graphs, in one memory pool: they run one after the other, and each one's output is used before the next runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and makes cuBLAS's workspaces, which a capture can't
                work()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads copy blocks meanwhile: their calls are none of this capture's
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = work()
        return output, graph.replay


class Rerun:
    """Runs the work again and copies the output to where the first one was."""

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        output = work()

        def replay() -> None:
            output.copy_(work())

        return output, replay


class StaticInputs:
    """Named int32 inputs at fixed places of one run of device memory, all padding at first.

    Where the last field has no padding, what a step does not give of its first axis stays behind: so the largest belongs there.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        self._fields = dict(fields)
        sizes = [int(np.prod(field.shape)) for field in fields.values()]
        starts, num_words = layout(sizes)
        self._places = {name: slice(start, start + size) for name, start, size in zip(fields, starts, sizes, strict=True)}
        self._memory = torch.zeros(num_words, dtype=torch.int32, device=device)
        self.views = {name: self._memory[place].view(fields[name].shape) for name, place in self._places.items()}
        self.fill({})

    def fits(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether every array is within its field."""
        return all(
            all(has <= room for has, room in zip(array.shape, self._fields[name].shape, strict=True)) for name, array in arrays.items()
        )

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy ``arrays`` to the first places of their fields and padding behind them, in one transfer."""
        num_words = self._words_of(arrays)
        host = torch.empty(num_words, dtype=torch.int32, pin_memory=self._memory.device.type == "cuda")
        words = host.numpy()
        for name, field in self._fields.items():
            target = words[self._places[name]]
            if field.padding is not None:
                target.fill(field.padding)
            if name in arrays:
                target = target.reshape(-1, *field.shape[1:])
                target[tuple(slice(size) for size in arrays[name].shape)] = arrays[name]
        self._memory[:num_words].copy_(host, non_blocking=True)

    def _words_of(self, arrays: Mapping[str, np.ndarray]) -> int:
        """From the first word on, how many of the memory a step changes."""
        name, field = next(reversed(self._fields.items()))
        if field.padding is not None:
            return len(self._memory)
        num_given = len(arrays[name]) if name in arrays else 0
        return self._places[name].start + num_given * int(np.prod(field.shape[1:]))


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: StaticInputs
    output: Tensor
    replay: Callable[[], None]


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are captured for: powers of two and the middles between them, up to ``max_rows`` and that itself."""
    powers = [1 << exponent for exponent in range(max_rows.bit_length())]
    sizes = {1, 2, *powers, *(power * 3 // 2 for power in powers if power >= 8)}
    return (*sorted(size for size in sizes if size < max_rows), max_rows)


class DecodeGraphs:
    """Graphs of ``work`` by number of rows. ``fields(n)`` are the inputs of a graph for n rows."""

    def __init__(
        self, work: Work, fields: Callable[[int], Mapping[str, Field]], buckets: Sequence[int], maker: GraphMaker, device: torch.device
    ) -> None:
        self._work = work
        self._fields = fields
        self._buckets = tuple(sorted(buckets))
        self._maker = maker
        self._device = device
        self._graphs: dict[int, _Graph] = {}

    @property
    def is_captured(self) -> bool:
        return bool(self._graphs)

    def capture(self) -> None:
        """Capture every graph over padding alone; the largest first, so that the others find their memory in its."""
        for bucket in reversed(self._buckets):
            inputs = StaticInputs(self._fields(bucket), self._device)
            output, replay = self._maker.capture(lambda inputs=inputs: self._work(inputs.views))  # type: ignore[misc]
            replay()  # the first launch of a graph brings it to the device
            self._graphs[bucket] = _Graph(inputs, output, replay)

    def run(self, num_rows: int, arrays: Mapping[str, np.ndarray]) -> Tensor | None:
        """The work's output for ``num_rows`` rows, valid until the next run; None if no captured graph holds the step."""
        nth = bisect_left(self._buckets, num_rows)
        graph = self._graphs.get(self._buckets[nth]) if nth < len(self._buckets) else None
        if graph is None or not graph.inputs.fits(arrays):
            return None
        graph.inputs.fill(arrays)
        graph.replay()
        return graph.output[:num_rows]
