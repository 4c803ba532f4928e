"""The log pipeline: its three ends, redaction, the bridge, and journald's protocol over a real socket."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from kvd.observe import logging as kvd_logging
from kvd.observe.journal import JournalSocket


@pytest.fixture(autouse=True)
def _fresh_pipeline():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)


def records(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_record_has_room_level_time_and_context():
    stream = io.StringIO()
    kvd_logging.configure(log_format="json", stream=stream)
    structlog.contextvars.bind_contextvars(request_id=b"\x01\xff")
    kvd_logging.get_logger("storage").info("checkpoint", num_blocks=3)
    (record,) = records(stream)
    assert record.pop("timestamp").endswith("Z")
    assert record == {"event": "checkpoint", "room": "storage", "level": "info", "num_blocks": 3, "request_id": "01ff"}


def test_a_logger_of_structlog_itself_has_its_room_too():
    stream = io.StringIO()
    kvd_logging.configure(log_format="json", stream=stream)
    structlog.get_logger("daemon").info("ready")
    structlog.get_logger().info("nameless")
    assert [record.get("room") for record in records(stream)] == ["daemon", None]


def test_level_filters():
    stream = io.StringIO()
    kvd_logging.configure(level="warning", log_format="json", stream=stream)
    log = kvd_logging.get_logger("engine")
    log.info("no")
    log.warning("yes")
    assert [record["event"] for record in records(stream)] == ["yes"]


@pytest.mark.parametrize("key", ["prompt", "text", "messages", "output", "token_ids", "tokens"])
def test_what_users_wrote_is_not_logged_unless_asked(key):
    stream = io.StringIO()
    kvd_logging.configure(log_format="json", stream=stream)
    kvd_logging.get_logger("edge").info("request", **{key: "secret"})
    kvd_logging.get_logger("edge").info("request", **{key: 6})
    assert "secret" not in stream.getvalue()
    assert records(stream)[1][key] == 6, "a count is no secret"
    kvd_logging.configure(log_format="json", log_prompts=True, stream=stream)
    kvd_logging.get_logger("edge").info("request", **{key: "secret"})
    assert records(stream)[2][key] == "secret"


def test_python_logging_is_bridged_with_its_traceback():
    stream = io.StringIO()
    kvd_logging.configure(log_format="json", stream=stream)
    try:
        raise ValueError("boom")  # noqa: TRY301
    except ValueError:
        logging.getLogger("somebody.else").exception("it %s", "failed")
    logging.getLogger("somebody.else").log(25, "between levels")
    first, second = records(stream)
    assert (first["event"], first["room"], first["level"]) == ("it failed", "somebody.else", "error")
    assert "ValueError: boom" in first["exception"]
    assert (second["event"], second["level"]) == ("between levels", "info")


def test_configuring_twice_keeps_one_bridge():
    stream = io.StringIO()
    kvd_logging.configure(log_format="json", stream=stream)
    kvd_logging.configure(log_format="json", stream=stream)
    logging.getLogger("x").warning("once")
    assert len(records(stream)) == 1


def test_console_without_colours_off_a_terminal():
    stream = io.StringIO()
    kvd_logging.configure(log_format="console", stream=stream)
    kvd_logging.get_logger("daemon").info("ready", seconds=1.5)
    assert "ready" in stream.getvalue()
    assert "seconds=1.5" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_closed_stream_stops_nobody():
    stream = io.StringIO()
    kvd_logging.configure(log_format="json", stream=stream)
    stream.close()
    kvd_logging.get_logger("daemon").warning("nobody reads this")


def test_unconfigured_logger_keeps_standard_output_clean():
    code = "from kvd.observe.logging import get_logger; log = get_logger('x'); log.info('quiet'); log.warning('loud')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "loud" in done.stderr
    assert "quiet" not in done.stderr


def test_journal_stream_is_recognised_by_device_and_inode(tmp_path: Path):
    with (tmp_path / "stderr").open("w") as stream:
        stat = os.fstat(stream.fileno())
        assert kvd_logging.is_journal_stream(f"{stat.st_dev}:{stat.st_ino}", stream)
        assert not kvd_logging.is_journal_stream(f"{stat.st_dev}:{stat.st_ino + 1}", stream)
        assert not kvd_logging.is_journal_stream("", stream)
    assert not kvd_logging.is_journal_stream("1:2", io.StringIO())


def parse_journal(datagram: bytes) -> dict[str, str]:
    """An independent reader of the native protocol."""
    fields, rest = {}, datagram
    while rest:
        line, _, rest = rest.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + size], rest[8 + size :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        fields[name.decode()] = value.decode()
    return fields


@pytest.fixture
def journald(tmp_path: Path):
    path = str(tmp_path / "journal")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(5)
        yield receiver, path


def test_journal_record_with_a_multi_line_value(journald):
    receiver, path = journald
    journal = JournalSocket(path)
    journal.send(
        journal.render({"event": "step failed", "level": "error", "room": "engine", "num_rows": 4, "exception": "Traceback\n  boom"})
    )
    fields = parse_journal(receiver.recv(65536))
    assert fields["MESSAGE"] == "step failed room=engine num_rows=4\nTraceback\n  boom"
    assert fields["PRIORITY"] == "3"
    assert fields["SYSLOG_IDENTIFIER"] == "kvd"
    assert fields["KVD_EVENT"] == "step failed"
    assert fields["KVD_NUM_ROWS"] == "4"
    assert fields["KVD_EXCEPTION"] == "Traceback\n  boom"
    journal.close()


def test_a_record_longer_than_a_datagram_goes_as_a_sealed_file(journald):
    receiver, path = journald
    journal = JournalSocket(path)
    long = "x" * 4_000_000
    journal.send(journal.render({"event": long, "level": "info"}))
    data, descriptors, _, _ = socket.recv_fds(receiver, 10, 1)
    assert data == b""
    with os.fdopen(descriptors[0], "rb") as file:
        file.seek(0)
        assert parse_journal(file.read())["KVD_EVENT"] == long
    journal.close()


def test_what_the_journal_does_not_take_is_counted_and_told(tmp_path: Path):
    path = tmp_path / "journal"
    journal = JournalSocket(str(path))
    for _ in range(3):
        journal.send(journal.render({"event": "lost", "level": "info"}))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(5)
        journal.send(journal.render({"event": "back", "level": "info"}))
        assert parse_journal(receiver.recv(65536))["KVD_DROPPED_RECORDS"] == "3"
        journal.send(journal.render({"event": "calm", "level": "info"}))
        assert "KVD_DROPPED_RECORDS" not in parse_journal(receiver.recv(65536))
    journal.close()


def test_the_whole_pipeline_into_the_journal(journald, monkeypatch):
    receiver, path = journald
    journal = JournalSocket(path)
    monkeypatch.setattr("kvd.observe.journal.JournalSocket", lambda: journal)
    kvd_logging.configure(log_format="journald")
    kvd_logging.get_logger("transport").info("request", request_id=b"\xab", prompt="secret")
    fields = parse_journal(receiver.recv(65536))
    assert fields["KVD_REQUEST_ID"] == "ab"
    assert fields["KVD_ROOM"] == "transport"
    assert fields["PRIORITY"] == "6"
    assert "secret" not in "".join(fields.values())
    journal.close()


def test_on_a_terminal_a_record_overwrites_the_bar_under_way():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    kvd_logging.configure(log_format="auto", environ={"NO_COLOR": "1"}, stream=stream)
    kvd_logging.get_logger("daemon").info("ready")
    assert stream.getvalue().startswith("\r\x1b[K")
    assert stream.getvalue().count("\x1b") == 1, "NO_COLOR is respected"
