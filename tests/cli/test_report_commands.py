"""What the daemon and the program tell of themselves: objects for scripts; words, units and tables for people."""

from __future__ import annotations

import re

import pytest
from stub_client import PREFIXES, STATS, STATUS, only_object

from kvd.cli import app
from kvd.cli.output import print_rows


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["status"], STATUS),
        (["stats"], STATS),
        (["prefixes"], PREFIXES),
        (["checkpoint"], {"blocks": 3, "bytes": 1 << 20}),
        (["unpin", "a"], {"name": "a", "unpinned": True}),
        (["drain"], {"draining": True}),
        (["ping"], {"endpoint": "ipc:///default", "state": "ready", "instance": "cd" * 4, "round_trip_ms": 2.0}),
    ],
)
def test_json_of_the_other_commands(stub, capsys, arguments, expected):
    assert app.main([*arguments, "--json"]) == 0
    assert only_object(capsys.readouterr().out) == expected


def test_human_status(stub, capsys):
    assert app.main(["status"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    facts = {name.strip(): value.strip() for name, value in lines.items()}
    assert facts["state"] == "ready"
    assert facts["uptime"] == "1m 1s"
    assert facts["requests"] == "running 2, waiting 1, stalled 0"
    assert facts["store"] == "nodes 5, blocks 4, bytes 3.0 MiB, wal 1000 B, last checkpoint age 2.0s, degraded no"
    assert facts["dropped"] == "checksum 1"


def test_human_status_says_what_the_start_is_at(stub, capsys, monkeypatch):
    monkeypatch.setitem(STATUS, "progress", "loading weights: 40 %")
    assert app.main(["status"]) == 0
    assert "progress     loading weights: 40 %" in capsys.readouterr().out.splitlines()


def test_human_status_warns_of_pins_that_are_not_held(stub, capsys, monkeypatch):
    assert app.main(["status"]) == 0
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setitem(STATUS["rehydration"], "pins_not_held", 2)
    assert app.main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split(maxsplit=1) == ["warning", "2 of the pins not held; `kvd prefixes` says why"]
    assert "not held" not in next(line for line in lines if line.startswith("rehydration"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "nothing holds copies to disk back"),
        ("rate", "checkpoint_bytes_per_s is used up"),
        ("queue", "more requests wait than checkpoint_pause_queue_depth"),
        ("staging", "the disk is slower than the copies"),
        ("in_flight", "as much as may be is under way"),
        ("disk", "the disk budget is full, or the store is degraded"),
        ("of-a-later-version", "holds copies back"),
    ],
)
def test_human_status_says_in_words_what_holds_copies_back(stub, capsys, monkeypatch, name, words):
    for key, value in (("governor", name), ("waiting_blocks", 3), ("waiting_bytes", 3 << 20)):
        monkeypatch.setitem(STATUS["store"], key, value)
    assert app.main(["status"]) == 0
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()}
    assert lines["governor"] == f"{name}: {words}; 3 blocks (3.0 MiB) wait to be written"
    assert "waiting" not in lines["store"]


def test_human_status_says_what_is_not_on_disk_and_why(stub, capsys, monkeypatch):
    values = {
        "unwritten_blocks": 300,
        "refused_blocks": 0,
        "max_block_bytes": 39 << 20,
        "max_bytes": 80 << 20,
        "encrypted": True,
        "damage": [],
    }
    for key, value in values.items():
        monkeypatch.setitem(STATUS["store"], key, value)

    def lines() -> dict[str, str]:
        assert app.main(["status"]) == 0
        return dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())

    shown = lines()
    assert shown["not on disk"] == "300 of the blocks in memory"
    assert shown["disk budget"] == "blocks may take 39.0 MiB of 80.0 MiB (store_max_bytes), and take 3.0 MiB"
    assert shown["store"].endswith("degraded no, encrypted yes, damage none")
    monkeypatch.setitem(STATUS["store"], "refused_blocks", 217)
    assert lines()["not on disk"] == "300 of the blocks in memory; 217 hot ones found no room under store_max_bytes"


def test_human_stats_and_prefixes(stub, capsys):
    assert app.main(["stats"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0][:2] == ["COUNTER", "VALUE"]
    assert ["scheduler.prefill_tokens", "120", "12.5"] in rows
    assert ["transport.prefill_tokens", "7", "-"] in rows, "a rate belongs to the counter of its own room"
    assert ["store.wal_bytes", "2.0", "KiB", "-"] in rows
    assert ["store.cold_bytes_per_s", "3.0", "GiB/s", "-"] in rows
    assert ["store.prefill_tokens_per_s", "1663", "-"] in rows
    assert ["store.cold_latency_ms", "-", "-"] in rows, "not measured yet"
    assert app.main(["prefixes"]) == 0
    text = capsys.readouterr().out
    assert "1 pins" in text
    assert "support" in text
    assert "1m 1s" in text


def test_tables_align_numbers_to_the_right(capsys):
    print_rows(("NAME", "N"), [("a", "5"), ("longer", "100")])
    assert capsys.readouterr().out == "NAME      N\na         5\nlonger  100\n"
    print_rows(("NAME",), [])
    assert capsys.readouterr().out == "none\n"


def test_version(capsys):
    assert app.main(["version", "--json"]) == 0
    assert set(only_object(capsys.readouterr().out)) == {"version", "python"}
    assert app.main(["version"]) == 0
    line = capsys.readouterr().out
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == line
