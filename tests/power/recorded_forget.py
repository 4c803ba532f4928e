"""A forget through power cuts: ``live DIR LOG`` under ``record_io.c``, then ``check LOG SEED FRACTION SCRATCH``, which prints JSON as ``check_states.py`` does.

What must hold: others' pins and bytes, whatever is left; nothing of what was forgotten in any file once it was told, before and after the next start.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
sys.path.insert(0, str(Path(__file__).parent))

from check_states import MAX_FINDINGS, is_ignored
from forget_world import ACME_SALTED, KEPT, OTHERS, OWN, OWN_ROWS, SALTED, WHOLE, forget, found_in, live, needles
from replay import Disk, mark, materialise, read_log
from storage_harness import World

GONE = OWN | OWN_ROWS | needles(ACME_SALTED, SALTED)
SETTINGS = {"store_max_bytes": 32 << 20, "wal_segment_bytes": 1 << 13}


def run(state_dir: Path, log: Path) -> None:
    world = World(state_dir, **SETTINGS)
    live(world)
    mark(log, lived=True)
    assert not forget(world, WHOLE).error
    mark(log, told=True)
    world.ask(KEPT, OTHERS)
    world.stop()


def check(disk: Path, marks: set[str]) -> list[str]:
    wrong = []
    state_dir = disk / "state"
    if "told" in marks and (found := found_in(state_dir, GONE)):
        wrong.append(f"found: {sorted(found)}")
    world = World(state_dir, **SETTINGS)
    pins = set(world.storage.recipe_book.recipes())
    if "lived" in marks and not {"rules"} <= pins <= {"rules", "acme/safe"}:
        wrong.append(f"pins: {pins}")
    if "told" in marks and pins != {"rules"}:
        wrong.append(f"pins: {pins}")
    if damage := world.storage.status()["damage"]:
        wrong.append(f"damage: {damage}")
    if world.report.dropped:
        wrong.append(f"blocks: {world.report.dropped}")
    if world.ask(KEPT, OTHERS) != 96 and "lived" in marks:
        wrong.append("others' bytes are gone")
    world.stop(clean=False)
    if "told" in marks and (found := found_in(state_dir, GONE)):
        wrong.append(f"found after the start: {sorted(found)}")
    return wrong


def check_all(log: Path, seed: int, fraction: float, scratch: Path) -> None:
    num_states, findings = 0, []
    for interval in Disk(is_ignored=is_ignored).intervals(read_log(log)):
        rng = random.Random(f"{seed}:{interval.number}")
        marks = {name for each in interval.marks for name in each}
        for index, choices in enumerate(interval.choices(seed)):
            if "lived" not in marks or (index >= 2 and rng.random() >= fraction):
                continue
            num_states += 1
            shutil.rmtree(scratch / "disk", ignore_errors=True)
            (scratch / "disk").mkdir()
            materialise(interval.tree(choices), scratch / "disk")
            where = f"interval {interval.number}, {choices}"
            (scratch / "now").write_text(where)
            try:
                wrong = check(scratch / "disk", marks)
            except Exception as error:
                wrong = [repr(error)]
            if wrong and len(findings) < MAX_FINDINGS:
                lost = [repr(change)[:200] for change, choice in zip(interval.pending, choices, strict=True) if choice is not True]
                findings.append({"where": where, "marks": sorted(marks), "wrong": wrong, "lost": lost})
    print(json.dumps({"num_states": num_states, "found": findings}))


if __name__ == "__main__":
    if sys.argv[1] == "live":
        run(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        check_all(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
