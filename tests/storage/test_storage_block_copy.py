"""Block bytes are copied whole, from memory that can't be written as well, and other threads run meanwhile."""

from __future__ import annotations

import threading

import pytest

from kvd.storage.block_copy import copy_bytes

pytestmark = pytest.mark.store


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 368640])
@pytest.mark.parametrize("offset", [0, 1, 96])
def test_every_byte_arrives_and_no_other_is_touched(num_bytes, offset):
    source = bytes(index % 251 for index in range(num_bytes + offset))
    target = bytearray(b"\xff" * (num_bytes + 2))
    copy_bytes(memoryview(target)[1 : 1 + num_bytes], memoryview(source)[offset:])
    assert target == b"\xff" + source[offset:] + b"\xff"


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="broadcast"):
        copy_bytes(memoryview(bytearray(3)), memoryview(b"abcd"))


def test_others_run_while_it_copies():
    """A thread counts during one long copy; a copy that held the interpreter's lock would let it count next to nothing."""
    source, target = memoryview(bytes(128 << 20)), memoryview(bytearray(128 << 20))
    is_copying, counted, seen = threading.Event(), [0], []

    def count() -> None:
        is_copying.wait()
        while is_copying.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    is_copying.set()
    while not counted[0]:
        pass
    before = counted[0]
    copy_bytes(target, source)
    seen.append(counted[0] - before)
    is_copying.clear()
    thread.join()
    assert seen[0] > 1000
