"""How the engine's own cost grows with prompts, cached blocks, waiting requests and pins. Writes the table of docs/benchmarks-scaling.md.

    python tests/bench/bench_scaling.py [--out docs/benchmarks-scaling.md] [--quick]

No model: tests/bench/engine_alone.py. Figures are processor time of the engine's thread, the least of several repeats; collections of garbage while
the thing measured ran are in the last column.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from pathlib import Path

from engine_alone import BLOCK, EngineAlone, GcPauses, namespace_of, prompt_of

from kvd.cache.manager import CacheManager
from kvd.types import pack_tokens

REPEATS = 5


def least_us(work, make=lambda number: number, repeats=REPEATS):
    """The least processor time of ``work(make(number))`` in microseconds; ``make`` is not counted."""
    best = float("inf")
    for number in range(repeats):
        argument = make(number)
        began_s = time.thread_time()
        work(argument)
        best = min(best, time.thread_time() - began_s)
    return best * 1e6


def prompts(length):
    """Everything that the engine does for one prompt of so many tokens, first unknown, then known, one token out."""
    engine = EngineAlone(num_blocks=4 * REPEATS * (length // BLOCK + 2), max_running=4, max_tokens_per_step=512)
    scheduler, runner = engine.scheduler, engine.runner

    def serve(command):
        scheduler.submit(command)
        while scheduler.has_work():
            step = scheduler.schedule()
            scheduler.update(step, runner.execute(step))
            engine.cache.take_events()

    def command(number, prompt):
        return engine.command(prompt_of(prompt, length), max_tokens=1, request=number)

    with GcPauses() as pauses:
        cold = least_us(serve, lambda number: command(number, number))
        hit = least_us(serve, lambda number: command(100 + number, number))
    return {"cold": cold, "hit": hit}, pauses.worst_s


def decode_step(num_streams, num_cached, num_steps=160):
    """A step of streams that decode beside so many cached blocks, more blocks being free than background eviction wants; the collector as after the start."""
    num_blocks = int((num_cached + num_streams * 40) * 1.1)
    engine = EngineAlone(num_blocks=num_blocks, now=time.thread_time, max_running=num_streams, max_tokens_per_step=1024)
    engine.fill_cache(num_cached)
    for number in range(num_streams):
        engine.submit(prompt_of(number, 64))
    gc.collect()
    gc.freeze()
    with GcPauses() as pauses:
        engine.run(num_steps)
    gc.unfreeze()
    rounds = engine.rounds_s[40:]
    return {"step": statistics.median(rounds) * 1e6, "least": min(rounds) * 1e6, "most": max(rounds) * 1e6}, pauses.worst_s


def waiting(num_waiting):
    """A step of 16 streams that decode while so many requests wait, and what it costs to take one request more and to abort one."""
    engine = EngineAlone(num_blocks=2000, max_running=16, max_tokens_per_step=512)
    scheduler = engine.scheduler
    for number in range(16 + num_waiting):
        scheduler.submit(engine.command(prompt_of(number, 64), request=number))

    def step(_):
        out = scheduler.schedule()
        scheduler.update(out, engine.runner.execute(out))

    for _ in range(20):
        step(None)
    assert scheduler.num_waiting == num_waiting
    with GcPauses() as pauses:
        decode = least_us(step, repeats=60)
        submit = least_us(scheduler.submit, lambda number: engine.command(prompt_of(7, 64), request=10_000 + number))
        abort = least_us(lambda number: scheduler.abort((10_000 + number).to_bytes(16, "big")))
    return {"step": decode, "submit": submit, "abort": abort}, pauses.worst_s


def pins(num_pins, blocks_each=8):
    """Pin, match and allocate beside so many pins."""
    cache = CacheManager(num_blocks=4 * (num_pins + 100) * blocks_each, block_size_tokens=BLOCK)
    namespace = namespace_of(b"", b"")

    def load(number):
        prompt = prompt_of(number, blocks_each * BLOCK)
        blocks = [(prompt[first : first + 4 * BLOCK], 1) for first in range(0, len(prompt), 4 * BLOCK)]
        targets = cache.begin_load(namespace, blocks)
        cache.complete_fill([target.node for target in targets])
        cache.take_events()
        return prompt

    for number in range(num_pins):
        cache.pin(str(number), load(number), namespace)

    def allocate(prompt):
        table = cache.allocate(cache.match(prompt, namespace), len(prompt) // 4)
        cache.release(table)

    with GcPauses() as pauses:
        pin = least_us(lambda prompt: cache.pin("more", prompt, namespace), lambda number: load(10_000 + number))
        use = least_us(allocate, lambda number: prompt_of(number % num_pins, blocks_each * BLOCK) + pack_tokens([1]), repeats=20)
    return {"pin": pin, "use": use}, pauses.worst_s


SECTIONS = (
    ("Prompt tokens", prompts, (128, 512, 2048, 8192), "one request, all of its steps: unknown prompt; known prompt"),
    (
        "Running streams (1,000 cached blocks)",
        lambda n: decode_step(n, 1000),
        (1, 16, 64, 256, 512),
        "one step that decodes a token each: median, least and most",
    ),
    (
        "Cached blocks (64 streams)",
        lambda n: decode_step(64, n),
        (1_000, 10_000, 100_000, 1_000_000),
        "one step that decodes a token each: median, least and most",
    ),
    ("Waiting requests (16 streams)", waiting, (1, 16, 128, 512), "one step; one more request; one abort"),
    ("Pins of 8 blocks", pins, (1, 10, 100, 1000), "pin one more; allocate and release over a pinned prefix"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="only the first two sizes of each table")
    arguments = parser.parse_args()
    lines = [
        "# How the engine's cost grows",
        "",
        "Written by `python tests/bench/bench_scaling.py --out docs/benchmarks-scaling.md`: the daemon's own loop, scheduler and cache on an executor that answers at",
        "once, no model, disk or client. Microseconds of processor time of the engine's thread. `gc` is the longest pause of the collector while the row was",
        f"measured, in milliseconds of the wall clock. Python {platform.python_version()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}.",
    ]
    worst_s = 0.0
    for title, measure, sizes, what in SECTIONS:
        rows = []
        for size in sizes[:2] if arguments.quick else sizes:
            gc.collect()
            figures, pause_s = measure(size)
            worst_s = max(worst_s, pause_s)
            rows.append((size, figures, pause_s * 1e3))
            print(title, size, {key: round(value, 1) for key, value in figures.items()}, f"gc {pause_s * 1e3:.2f} ms", flush=True)
        names = list(rows[0][1])
        lines += [
            "",
            f"## {title}",
            "",
            f"{what[0].upper()}{what[1:]}.",
            "",
            f"| | {' | '.join(names)} | gc |",
            f"|---|{'---|' * (len(names) + 1)}",
        ]
        lines += [f"| {size:,} | {' | '.join(f'{figures[name]:,.1f}' for name in names)} | {pause:.2f} |" for size, figures, pause in rows]
    lines += ["", f"The longest pause of all: {worst_s * 1e3:.2f} ms.", ""]
    if arguments.out:
        arguments.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
