"""Copies on side streams over a device that does each stream's work as late, or as early, as the waits between streams let it: no GPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from kvd.executor.gpu.block_copies import SideStreamCopies

pytestmark = pytest.mark.torch

ROW_BYTES = 4


class Device:
    """Streams of work that nothing does before ``run``; the first named goes first wherever it may."""

    def __init__(self):
        self.compute = Stream(self)
        self.current = self.compute

    @torch.inference_mode()
    def run(self, order):
        streams = [{"compute": self.compute, "in": self.in_, "out": self.out}[name] for name in order]
        while any(stream.ahead for stream in streams):
            next(stream for stream in streams if stream.ahead and stream.ahead[0].may_run()).do_next()

    @contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Work:
    def __init__(self, do=lambda: None, after=None):
        self.do, self.after, self.is_done = do, after, False

    def may_run(self):
        return self.after is None or self.after.is_done


class Stream:
    def __init__(self, device):
        self.device = device
        self.ahead = []
        self.last = Work()
        self.last.is_done = True

    def add(self, work):
        self.ahead.append(work)
        self.last = work

    def wait_stream(self, other):
        self.add(Work(after=other.last))

    def do_next(self):
        work = self.ahead.pop(0)
        work.do()
        work.is_done = True


class Event:
    def record(self, stream):
        self.work = stream.last

    def query(self):
        return self.work.is_done

    def synchronize(self):
        assert self.work.is_done


class Rows:
    """The pool's rows as the device has them: every operation is the current stream's work."""

    def __init__(self, device, num_blocks):
        self.device = device
        self.memory = torch.zeros((num_blocks, ROW_BYTES), dtype=torch.uint8)

    def index_copy_(self, _dim, ids, rows):
        self.device.current.add(Work(lambda: self.memory.index_copy_(0, ids, rows)))

    def index_select(self, _dim, ids):
        taken = torch.zeros((len(ids), ROW_BYTES), dtype=torch.uint8)
        self.device.current.add(Work(lambda: taken.copy_(self.memory[ids])))
        return taken

    def fill(self, block_id, value):
        """A step's write."""
        self.device.current.add(Work(lambda: self.memory[block_id].fill_(value)))


class Pool:
    device = torch.device("cpu")
    row_bytes = ROW_BYTES

    def __init__(self, rows):
        self.rows = rows

    @staticmethod
    def device_ids(block_ids):
        return torch.tensor(block_ids)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    made = iter(("out", "in_"))

    def make_stream(_device):
        stream = Stream(device)
        setattr(device, next(made), stream)
        return stream

    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.use)
    device.rows = Rows(device, 8)
    device.copies = SideStreamCopies(Pool(device.rows))
    return device


ORDERS = pytest.mark.parametrize("order", [("compute", "in", "out"), ("in", "out", "compute"), ("out", "compute", "in")])


def row(value):
    return [value] * ROW_BYTES


@ORDERS
def test_a_step_that_comes_after_a_copy_in_writes_after_it(device, order):
    """The load was given up while its copy was under way, and the next step's row has the block."""
    device.rows.fill(3, 1)
    pending = device.copies.write_blocks([3, 4], memoryview(bytearray(row(7) + row(8))))
    device.rows.fill(3, 2)
    assert not pending.done()
    device.run(order)
    assert pending.done()
    assert device.rows.memory[3].tolist() == row(2), "the copy has overwritten the block's next owner"
    assert device.rows.memory[4].tolist() == row(8)


@ORDERS
def test_a_copy_in_comes_after_the_steps_before_it(device, order):
    device.rows.fill(3, 1)
    device.copies.write_blocks([3], memoryview(bytearray(row(7))))
    device.run(order)
    assert device.rows.memory[3].tolist() == row(7)


@ORDERS
def test_a_copy_out_takes_what_the_steps_before_it_wrote(device, order, monkeypatch):
    memory = bytearray(ROW_BYTES)
    copy = torch.Tensor.copy_

    def late(target, source, *, non_blocking=False):
        if not non_blocking:
            return copy(target, source)
        return device.current.add(Work(lambda: copy(target, source)))

    monkeypatch.setattr(torch.Tensor, "copy_", late)
    device.rows.fill(5, 6)
    pending = device.copies.read_blocks([5], memoryview(memory))
    device.rows.fill(4, 1)
    assert not pending.done()
    device.run(order)
    assert pending.done()
    assert list(memory) == row(6)
