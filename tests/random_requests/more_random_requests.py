"""Random requests for as long as you like: ``python tests/random_requests/more_random_requests.py --crowds 100 --seed 7``; the same seed draws the same crowds.

It wants ``PYTHONPATH=tests:tests/random_requests``, tells every breach, and keeps the state directory after one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from random_requests_world import Alone, Pressed, make_adapters
from test_random_requests import CROWD, FACTS, KILLED, PROCESS, PROCESS_FACTS, THREAD, press, press_and_kill
from test_random_requests_models import press_tiny
from wire_crowd import BreachError

MODES = {
    "thread": (FACTS, THREAD, Pressed.press),
    "process": (PROCESS_FACTS, PROCESS, Pressed.press),
    "killed": (FACTS, KILLED, press_and_kill),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crowds", type=int, default=100, help=f"of {CROWD} requests each")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--mode",
        choices=(*MODES, "native", "torch"),
        default="thread",
        help="what the daemon is, and what befalls it; native and torch: a tiny model on these kernels",
    )
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kvd-random-"))
    if options.mode not in MODES:
        press_tiny(root, num_crowds=options.crowds, first_seed=options.seed, kernels=options.mode)
        shutil.rmtree(root)
        return 0
    facts, flags, how = MODES[options.mode]
    adapters = make_adapters(root / "adapters")
    alone = Alone(root / "alone", adapters, "--kv-memory", "256KiB", "--max-model-len", "256")
    num_breaches = 0
    with alone.process, Pressed(root / "kvd", facts, adapters, *flags, alone=alone, with_tenants=options.mode == "process") as pressed:
        alone.wait_ready()

        def go_on(pressed: Pressed, crowd: list) -> None:
            nonlocal num_breaches
            try:
                how(pressed, crowd)
            except BreachError as breach:
                num_breaches += 1
                print(f"{options.mode}, seed {options.seed}: {breach}", file=sys.stderr, flush=True)
                if "without an end" in str(breach):
                    raise

        press(pressed, options.seed, options.crowds, go_on)
        alone.close()
    print(f"{options.mode}, seed {options.seed}: {num_breaches} crowds with breaches; {root if num_breaches else ''}")
    if not num_breaches:
        shutil.rmtree(root)
    return 1 if num_breaches else 0


if __name__ == "__main__":
    sys.exit(main())
