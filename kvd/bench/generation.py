"""What the generation features bring, as one plan: speculation by mode, streams beside arriving prompts, and the blocks that beams share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvd.bench.running import Entry, Target
from kvd.bench.sweeps import KINDS, Sweep

PARTS = ("speculation", "inter-token", "beam-width")
_BEAM_PROMPT_TOKENS = 160
"""As in the mean request of one of the data sets of the PagedAttention paper's figure about sharing."""


def generation_plan(
    parts: Sequence[str],
    arguments: tuple[str, ...],
    root: Path,
    *,
    rounds: int,
    arriving_tokens: int,
    output_tokens: int,
    streams: int,
    draft_model: str,
) -> tuple[list[Target], list[Entry]]:
    """Targets and entries of the named parts, for one run.

    Speculation takes part in all ``rounds``, for its ratios are near 1; the others, whose differences are large, in half of them.
    """
    targets: list[Target] = []
    entries: list[Entry] = []
    lengths = {"inter-token": arriving_tokens, "beam-width": _BEAM_PROMPT_TOKENS}
    for part in dict.fromkeys(parts):
        values = tuple(sorted({1, streams})) if part == "speculation" else KINDS[part].values
        sweep = Sweep(part, values, arguments, root, lengths.get(part, 0), output_tokens, streams, draft_model)
        found = sweep.targets()
        names = frozenset(target.name for target in found)
        own_rounds = rounds if part == "speculation" else max(1, rounds // 2)
        targets += found
        entries += [replace(entry, targets=names, rounds=own_rounds) for entry in sweep.entries()]
    return targets, entries
