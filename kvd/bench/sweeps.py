"""Sweeps over what a running daemon can't change (block size, head dimension), and over ways of sharing and widths of beams. Each variant is a daemon that the sweep starts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.bench.beam_server import WAYS, BeamServer, Way
from kvd.bench.kvd_server import KvdServer
from kvd.bench.launching import Launched
from kvd.bench.measuring import BenchError
from kvd.bench.plan import Point
from kvd.bench.random_model import write_random_model
from kvd.bench.running import Entry, Target
from kvd.bench.sharing_server import SHARING, Sharing, SharingServer

DEFAULTS: dict[str, tuple[int, ...]] = {"block-size": (8, 16, 32, 64), "head-dim": (32, 64, 128), "sharing": (), "beam-width": (2, 4, 6)}
_READY_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is swept: the kind, its values, and how the daemons are started.

    Attributes:
        arguments: of ``kvd serve``, for every variant (``--model``, ``--kv-memory``, …).
        root: a folder for sockets, logs and random models; its path must be short enough for a socket's.
    """

    kind: str
    values: tuple[int, ...]
    arguments: tuple[str, ...]
    root: Path

    def targets(self) -> list[Target]:
        """The variants; the first is the baseline. A client is made within the loop that uses it.

        Raises:
            BenchError: a value that can't be.
        """
        match self.kind:
            case "block-size":
                # The native kernels have one block size: a sweep that took them where it can would compare kernels.
                sizes = [("--kernels", "torch", "--block-size-tokens", str(size)) for size in self.values]
                return [self._target(f"block-{size[-1]}", size) for size in sizes]
            case "head-dim":
                return [self._target(f"head-{size}", ("--model", str(self._model(size)))) for size in self.values]
            case "beam-width":
                ways = [(way, width) for way in WAYS for width in self.values]
                return [self._target(f"{way}-{width}", (), _searching(way, width)) for way, width in ways]
            case _:
                return [self._target(sharing, (), _asking(sharing)) for sharing in SHARING]

    def entries(self, *, prefix_tokens: int, output_tokens: int, width: int) -> list[Entry]:
        """What each variant does. For ``sharing`` the requests are prompts with ``width`` answers each; for ``beam-width`` no request finds what another one computed."""
        if self.kind == "beam-width":
            return [Entry(Point("shared-prefix", prefix_tokens, output_tokens, 2, 6))]
        if self.kind == "sharing":
            return [Entry(Point("shared-prefix", prefix_tokens, output_tokens, 2, 4, n=width))]
        return [
            Entry(Point("prefill", prefix_tokens, 1, 1, 3)),
            Entry(Point("decode", 0, output_tokens * 2, width, width)),
            Entry(Point("shared-prefix", prefix_tokens, output_tokens, width, width)),
        ]

    def _target(self, name: str, arguments: Sequence[str], server: Callable[[str], KvdServer] = KvdServer) -> Target:
        endpoint = f"ipc://{self.root}/{name}.sock"
        words = [sys.executable, "-m", "kvd", "serve", "--no-persist", "--state-dir", str(self.root / name), "--listen", endpoint]
        command = shlex.join([*words, *self.arguments, *arguments])
        launched = Launched(name, command, self.root / f"{name}.log", ready_timeout_s=_READY_TIMEOUT_S)
        shown = shlex.join(["kvd", "serve", "--no-persist", *self.arguments, *arguments]).replace(f"{self.root}/", "")
        return Target(name, server(endpoint), endpoint, launched, command=shown)

    def _model(self, head_dim: int) -> Path:
        try:
            return write_random_model(self.root / f"model-{head_dim}", head_dim=head_dim)
        except ValueError as error:
            raise BenchError(str(error), kind="usage") from error


def _searching(way: Way, width: int) -> Callable[[str], KvdServer]:
    return lambda endpoint: BeamServer(endpoint, way, width)


def _asking(sharing: Sharing) -> Callable[[str], KvdServer]:
    return lambda endpoint: SharingServer(endpoint, sharing)
