"""Sweeps: over what a running daemon can't change (block size, head dimension, how steps are made), and over ways of asking one (sharing, beams, speculation). They start their daemons."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvd.bench.beam_server import WAYS, BeamServer, Way
from kvd.bench.kvd_server import KvdServer
from kvd.bench.launching import Launched
from kvd.bench.measuring import BenchError
from kvd.bench.plan import ANSWERS_A_STREAM, Point
from kvd.bench.random_model import write_random_model
from kvd.bench.running import Entry, Target
from kvd.bench.sharing_server import SHARING, Sharing, SharingServer
from kvd.bench.speculating_server import MODES, Mode, SpeculatingServer

_READY_TIMEOUT_S = 300.0
_BESIDE_TOKENS = 256
"""A step that takes a whole prompt has so many more for the streams beside it and the template."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kind of sweep goes over unless it is told, and how long its prompts are."""

    values: tuple[int, ...] = ()
    prefix_tokens: int = 1000


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "block-size": Kind((8, 16, 32, 64)),
        "head-dim": Kind((32, 64, 128)),
        "sharing": Kind(),
        "beam-width": Kind((2, 4, 6)),
        "speculation": Kind((1, 8)),
        "inter-token": Kind((200,), 4000),
    }
)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is swept: the kind, its values, and how the daemons are started.

    Attributes:
        arguments: of ``kvd serve``, for every variant (``--model``, ``--kv-memory``, …).
        root: a folder for sockets, logs and random models; its path must be short enough for a socket's.
        prefix_tokens, output_tokens, width: how long prompts (or what they share) and answers are, and how many streams run at once.
        draft_model: of ``speculation``: with one its mode ``draft`` is measured too.
    """

    kind: str
    values: tuple[int, ...]
    arguments: tuple[str, ...]
    root: Path
    prefix_tokens: int
    output_tokens: int
    width: int
    draft_model: str = ""

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
                return self._on_one("beams", (), {f"{way}-{width}": _searching(way, width) for way, width in ways})
            case "speculation":
                drafting = ("--draft-model", self.draft_model) if self.draft_model else ()
                modes = MODES if self.draft_model else MODES[:-1]
                return self._on_one("speculation", drafting, {mode: _speculating(mode) for mode in modes})
            case "inter-token":
                return self._pacing()
            case _:
                return [self._target(sharing, (), _asking(sharing)) for sharing in SHARING]

    def entries(self) -> list[Entry]:
        """What each variant does.

        ``sharing``: prompts with ``width`` answers each. ``beam-width``: no request finds what another one computed. ``speculation``: the values are numbers of streams.
        """
        match self.kind:
            case "beam-width":
                return [Entry(Point("shared-prefix", self.prefix_tokens, self.output_tokens, 2, 6))]
            case "sharing":
                return [Entry(Point("shared-prefix", self.prefix_tokens, self.output_tokens, 2, 4, n=self.width))]
            case "speculation":
                return [
                    Entry(Point(scenario, 0, self.output_tokens * 2, streams, streams * ANSWERS_A_STREAM))
                    for streams in self.values
                    for scenario in ("repetitive", "random")
                ]
            case "inter-token":
                return [Entry(Point("arriving", self.prefix_tokens, self.output_tokens * 4, self.width, 3))]
            case _:
                return [
                    Entry(Point("prefill", self.prefix_tokens, 1, 1, 3)),
                    Entry(Point("decode", 0, self.output_tokens * 2, self.width, self.width)),
                    Entry(Point("shared-prefix", self.prefix_tokens, self.output_tokens, self.width, self.width)),
                ]

    def _pacing(self) -> list[Target]:
        """The whole prompt in a step, pieces of the usual size, and pieces by each bound in milliseconds."""
        whole = str(math.ceil(self.prefix_tokens * 1.1) + _BESIDE_TOKENS)  # sentences are no exact measure of tokens
        return [
            self._target("unchunked", ("--max-inter-token-ms", "0", "--max-tokens-per-step", whole)),
            self._target("chunked", ("--max-inter-token-ms", "0")),
            *(self._target(f"bound-{bound}", ("--max-inter-token-ms", str(bound))) for bound in self.values),
        ]

    def _target(self, name: str, arguments: Sequence[str], server: Callable[[str], KvdServer] = KvdServer) -> Target:
        [target] = self._on_one(name, arguments, {name: server})
        return target

    def _on_one(self, daemon: str, arguments: Sequence[str], servers: Mapping[str, Callable[[str], KvdServer]]) -> list[Target]:
        """Targets that are ways of asking one daemon."""
        endpoint = f"ipc://{self.root}/{daemon}.sock"
        words = [sys.executable, "-m", "kvd", "serve", "--no-persist", "--state-dir", str(self.root / daemon), "--listen", endpoint]
        command = shlex.join([*words, *self.arguments, *arguments])
        launched = Launched(daemon, command, self.root / f"{daemon}.log", ready_timeout_s=_READY_TIMEOUT_S)
        shown = shlex.join(["kvd", "serve", "--no-persist", *self.arguments, *arguments]).replace(f"{self.root}/", "")
        return [Target(name, server(endpoint), endpoint, launched, command=shown) for name, server in servers.items()]

    def _model(self, head_dim: int) -> Path:
        try:
            return write_random_model(self.root / f"model-{head_dim}", head_dim=head_dim)
        except ValueError as error:
            raise BenchError(str(error), kind="usage") from error


def _searching(way: Way, width: int) -> Callable[[str], KvdServer]:
    return lambda endpoint: BeamServer(endpoint, way, width)


def _speculating(mode: Mode) -> Callable[[str], KvdServer]:
    return lambda endpoint: SpeculatingServer(endpoint, mode)


def _asking(sharing: Sharing) -> Callable[[str], KvdServer]:
    return lambda endpoint: SharingServer(endpoint, sharing)
