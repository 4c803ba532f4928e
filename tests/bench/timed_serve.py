"""``kvd`` itself, whose executor notes when each of its steps began and ended.

    python tests/bench/timed_serve.py FILE serve --listen …

Each step appends one record to FILE: begin and end of its computing (seconds of ``time.perf_counter``), and whether a row of an earlier step went on in it. ``read_gaps``
makes of them how long the executor had no step between two of the same stream.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
import time
from pathlib import Path

STEP = struct.Struct("=dd?")


def read_gaps(path: Path) -> list[float]:
    """Seconds from the end of a step to the beginning of the next, where that one goes on with a row: while nobody asks there is no gap."""
    steps = list(STEP.iter_unpack(path.read_bytes()))
    return [begin_s - end_s for (_, end_s, _), (begin_s, _, goes_on) in itertools.pairwise(steps) if goes_on]


class Noted:
    """A step that was launched: noted when its result is taken. The queue of the native kernels knows when it computed it."""

    def __init__(self, pending, note):
        self._pending = pending
        self._note = note

    def done(self):
        return self._pending.done()

    def result(self):
        output = self._pending.result()
        self._note(*self._pending.queued.times_s)
        return output


def note_steps(path: str) -> None:
    """From here on executor threads write down their steps."""
    from kvd.executor.worker import ExecutorThread

    notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    start = ExecutorThread.__init__

    def start_timed(self, runner, *rest):
        kind = type(runner)  # an instance may have no room for another attribute
        execute = kind.execute

        def timed(runner, step):
            goes_on = bool(step.continued.rows)

            def note(began_s, ended_s):
                os.write(notes, STEP.pack(began_s, ended_s, goes_on))

            began_s = time.perf_counter()
            output = execute(runner, step)
            if hasattr(output, "queued"):
                return Noted(output, note)
            note(began_s, time.perf_counter())
            return output

        kind.execute = timed
        start(self, runner, *rest)

    ExecutorThread.__init__ = start_timed


if __name__ == "__main__":
    note_steps(sys.argv[1])
    sys.argv = ["kvd", *sys.argv[2:]]
    from kvd.__main__ import main

    sys.exit(main())
