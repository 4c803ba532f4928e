"""sd_notify over a real datagram socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.observe.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(5)
        yield receiver, path


def test_messages_are_those_of_the_protocol(manager):
    receiver, path = manager
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": path})
    assert notifier.enabled
    notifier.status("rehydrating 3/7\nblocks")
    notifier.extend_timeout(3_000_000)
    notifier.ready()
    notifier.watchdog()
    notifier.stopping()
    received = [receiver.recv(4096).decode() for _ in range(5)]
    assert received == ["STATUS=rehydrating 3/7 blocks", "EXTEND_TIMEOUT_USEC=3000000", "READY=1", "WATCHDOG=1", "STOPPING=1"]
    notifier.close()


def test_abstract_address():
    name = f"kvd-test-notify-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        receiver.settimeout(5)
        notifier = Notifier.from_environment({"NOTIFY_SOCKET": "@" + name})
        notifier.ready()
        assert receiver.recv(100) == b"READY=1"
        notifier.close()


def test_without_a_manager_nothing_happens():
    notifier = Notifier.from_environment({})
    assert not notifier.enabled
    assert notifier.watchdog_interval_s() is None
    notifier.ready()
    notifier.watchdog()
    notifier.close()


def test_a_dead_manager_is_not_an_error(manager):
    receiver, path = manager
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": path})
    receiver.close()
    Path(path).unlink()
    notifier.ready()
    notifier.watchdog()
    notifier.close()


def test_a_full_queue_does_not_block_the_loop(manager):
    _, path = manager
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": path})
    for _ in range(5000):  # far beyond net.unix.max_dgram_qlen; nobody reads
        notifier.watchdog()
    notifier.close()


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_interval_is_half_of_the_managers(environ, interval_s):
    assert Notifier.from_environment(environ).watchdog_interval_s() == interval_s
