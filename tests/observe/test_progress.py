"""The progress of a start: a bar for people, records for logs."""

from __future__ import annotations

import io

from kvd.observe.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_off_a_terminal_a_record_each_tenth():
    records = []
    progress = Progress("loading weights", stream=io.StringIO(), log=lambda event, **values: records.append((event, values)))
    for done in range(1001):
        progress.update(done, 1000)
    progress.close()
    assert len(records) == 11
    assert records[0] == ("loading weights", {"done": 0, "total": 1000, "percent": 0})
    assert records[-1] == ("loading weights", {"done": 1000, "total": 1000, "percent": 100})


def test_on_a_terminal_one_line_that_is_redrawn():
    terminal = Terminal()
    progress = Progress("rehydrating", stream=terminal)
    progress.update(0, 4)
    progress.update(1, 4)
    progress.update(1, 4)
    progress.update(4, 4)
    progress.close()
    drawn = terminal.getvalue().split("\r")
    assert [line[-5:] for line in drawn[1:-1]] == ["  0 %", " 25 %"]
    assert drawn[-1] == f"rehydrating [{'#' * 30}] 100 %\n"


def test_nothing_to_do_is_complete():
    records = []
    Progress("rehydrating", stream=io.StringIO(), log=lambda _, **values: records.append(values["percent"])).update(0, 0)
    assert records == [100]
