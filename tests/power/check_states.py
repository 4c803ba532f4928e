"""Start the storage room on the directories that a power cut may leave: ``check_states.py LOG SEED SHARE NUM_SHARES FRACTION SCRATCH``.

A process of its own, since a directory that kills its reader (a bad map is SIGBUS) would be a finding like any other: ``SCRATCH/now`` names the state under check.
Prints one JSON object: the number of states, and what was found wrong.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
sys.path.insert(0, str(Path(__file__).parent))

from recorded_life import PROMPTS, SETTINGS, config_of
from replay import Disk, Interval, materialise, read_log
from storage_harness import World, chain_of

from kvd.storage.tools import check_store

MAX_FINDINGS = 20


def is_ignored(path: str) -> bool:
    """Locks: what they hold does not matter (the table of docs/storage-format.md), and LMDB's is a map."""
    return path.endswith(("/lock", "/lock.mdb"))


class Promises:
    """What may be found of each pin (its tokens, or None for no such pin), and what else must be.

    Marks: ``begin``: it was asked for, and may be there or not from now on. ``done``: it was acknowledged. ``lazy``: it was acknowledged, and may be lost to a power
    cut until the mark ``settled``. ``known`` and ``lazy_known``: a prompt whose blocks the log knows.
    """

    def __init__(self, marks: Iterable[dict], *, keeps_unsynced: bool = False) -> None:
        self.allowed: dict[str, set[str | None]] = {}
        self.with_bytes: set[str] = set()
        """Tokens of pins whose bytes were said to be on disk."""
        self.known: set[str] = set()
        lazy: dict[str, str | None] = {}
        lazily_known: set[str] = set()
        for mark in marks:
            if mark.get("how") == "recipe+bytes":
                self.with_bytes.add(mark["tokens"])
            if "settled" in mark:
                self.allowed |= {name: {tokens} for name, tokens in lazy.items()}
                self.known |= lazily_known
                lazy.clear()
            elif "known" in mark:
                self.known.add(mark["known"])
            elif "lazy_known" in mark:
                (self.known if keeps_unsynced else lazily_known).add(mark["lazy_known"])
            elif "begin" in mark:
                self.allowed.setdefault(mark["begin"], {None}).add(mark["tokens"])
                lazy.pop(mark["begin"], None)
            elif "done" in mark or keeps_unsynced:
                self.allowed[mark.get("done") or mark["lazy"]] = {mark["tokens"]}
            else:
                lazy[mark["lazy"]] = mark["tokens"]


def check(state_dir: Path, promised: Promises, **config: object) -> list[str]:
    """What a start on ``state_dir`` breaks of what was promised, and of what a clean cut must not do; each begins with its kind and a colon."""
    wrong = []
    world = World(state_dir, **(SETTINGS | config))
    try:
        recipes = world.storage.recipe_book.recipes()
        pins: dict[str, str | None] = {name: recipe.token_ids.hex() for name, recipe in recipes.items()}
        for name in pins.keys() | promised.allowed.keys():
            allowed = promised.allowed.get(name, {None})
            if pins.get(name) not in allowed:
                wrong.append(f"pin: {name}: found {str(pins.get(name))[:16]}, allowed {[str(each)[:16] for each in allowed]}")
        if damage := world.storage.status()["damage"]:
            wrong.append(f"damage: {damage}")
        if world.report.dropped:
            wrong.append(f"blocks: {world.report.dropped}")
        index = world.storage._running.recovered.index
        chains = {tokens: chain_of(bytes.fromhex(tokens), world.namespace) for tokens in promised.known}
        wrong += [
            f"log: unknown, though it was known: {tokens[:16]}" for tokens, chain in chains.items() if not index.nodes.keys() >= set(chain)
        ]
        for tokens in pins.values():
            token_ids = bytes.fromhex(tokens or "")
            cached = world.ask(token_ids + bytes(4))
            if tokens in promised.with_bytes and cached < len(token_ids) // 64 * 16:
                wrong.append(f"bytes: {cached} tokens of a pin whose bytes were on disk")
        for token_ids in PROMPTS:
            world.ask(token_ids)
    finally:
        world.stop(clean=False)
    report = check_store(state_dir, key_file=str(config.get("store_encryption_key_file", "")))
    if not report["ok"]:
        wrong.append(f"check: after the start: {report['problems']}")
    again = World(state_dir, **(SETTINGS | config))
    if damage := again.storage.status()["damage"]:
        wrong.append(f"damage at the start after: {damage}")
    again.stop(clean=False)
    return wrong


def states(log: Path, seed: int, fraction: float):
    """(interval, choices) of every state; of those beyond none and all, a seeded ``fraction``."""
    for interval in Disk(is_ignored=is_ignored).intervals(read_log(log)):
        rng = random.Random(f"{seed}:{interval.number}:chosen")
        for index, choices in enumerate(interval.choices(seed)):
            if index < 2 or rng.random() < fraction:
                yield interval, choices


def main(log: Path, seed: int, share: int, num_shares: int, fraction: float, scratch: Path) -> None:
    num_states, found = 0, []
    now: tuple[Interval, Promises] | None = None
    for index, (interval, choices) in enumerate(states(log, seed, fraction)):
        if index % num_shares != share:
            continue
        if now is None or now[0] is not interval:
            now = interval, Promises(interval.marks)
        num_states += 1
        where = f"interval {interval.number}, {choices}"
        (scratch / "now").write_text(where)
        disk = scratch / "disk"
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir()
        materialise(interval.tree(choices), disk)
        try:
            wrong = check(disk / "state", now[1], **config_of(log))
        except Exception as error:
            wrong = [repr(error)]
        if wrong:
            lost = [change for change, choice in zip(interval.pending, choices, strict=True) if choice is not True]
            found.append({"where": where, "wrong": wrong, "lost": [repr(change)[:200] for change in lost]})
            if len(found) >= MAX_FINDINGS:
                break
    print(json.dumps({"num_states": num_states, "found": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), Path(sys.argv[6]))
