"""What sharing saves of the KV blocks of samples and beams, counted at every step over the fake executor: no clock is involved, the figures are the same everywhere.

    python tests/bench/bench_beam_blocks.py

Prints (places in block tables - blocks) / places, summed over all steps, as in figure 15 of Kwon et al., "Efficient memory management for large language model
serving with PagedAttention" (2023), for requests as long as the means of that paper's two data sets.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from beam_world import World

from kvd.types import BeamSearch, SamplingParams

LENGTHS = {"19 + 58": (19, 58), "161 + 338": (161, 338)}
WIDTHS = (2, 4, 6)
REQUESTS = 6


def saved(way: str, width: int, prompt_tokens: int, output_tokens: int) -> float:
    """The part of the places, over requests one after another."""
    world = World(num_blocks=1000, block_size=16, max_model_len=1000, max_tokens_per_step=512)
    references = used = 0
    for number in range(REQUESTS):
        prompt = bytes(random.Random(number).choices(b"abcdefgh ", k=prompt_tokens))
        if way == "beams":
            world.submit(prompt, max_tokens=output_tokens, beam=BeamSearch(width))
        else:
            sampling = SamplingParams(seed=number)
            world.submit(prompt, max_tokens=output_tokens, num_choices=width, sampling=sampling, credit_tokens=width * output_tokens)
        while world.scheduler.has_work():
            step = world.scheduler.schedule()
            world.take(world.scheduler.update(step, world.runner.execute(step)))
            references += world.cache.num_references
            used += world.cache.num_used
    return (references - used) / references


def main() -> None:
    print("| | tokens | " + " | ".join(f"{width}" for width in WIDTHS) + " |")
    print("|---|---|" + "---:|" * len(WIDTHS))
    for way in ("samples", "beams"):
        for name, (prompt_tokens, output_tokens) in LENGTHS.items():
            figures = (f"{100 * saved(way, width, prompt_tokens, output_tokens):.1f} %" for width in WIDTHS)
            print(f"| {way} | {name} | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
