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
    drawn = terminal.getvalue().split("\r\x1b[K")
    full = f"rehydrating [{'#' * 30}] 100 %"
    assert [line[-5:] for line in drawn[1:3]] == ["  0 %", " 25 %"]
    assert drawn[3:] == [full, f"{full}\n"]


def test_two_bars_at_once_end_on_lines_of_their_own():
    terminal = Terminal()
    first, second = Progress("a", stream=terminal), Progress("b", stream=terminal)
    first.update(1, 2)
    second.update(1, 2)
    first.close()
    second.update(2, 2)
    second.close()
    lines = [line.rpartition("\r\x1b[K")[2] for line in terminal.getvalue().split("\n")]
    assert [line[:1] + line[-5:] for line in lines if line] == ["a 50 %", "b100 %"]


def test_nothing_to_do_is_complete():
    records = []
    Progress("rehydrating", stream=io.StringIO(), log=lambda _, **values: records.append(values["percent"])).update(0, 0)
    assert records == [100]
