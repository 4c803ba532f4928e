"""The executor's thread: order, several steps in flight, failure, closing."""

from __future__ import annotations

import threading
import time

import pytest

from kvd.executor.worker import ExecutorClosedError, ExecutorFailedError, ExecutorThread
from kvd.step import ContinuedRows, ExecutorOutput, SchedulerOutput
from kvd.types import KvGroup

ROW_BYTES = 4


class RecordingRunner:
    """Four bytes a block; a step waits at ``gate`` and is noted; step 13 raises."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.log: list[str] = []
        self.blocks: dict[int, bytes] = {}
        self.threads: set[int] = set()

    def groups(self):
        return (KvGroup("target", ROW_BYTES, b"f" * 32),)

    def execute(self, step):
        self.gate.wait()
        self.threads.add(threading.get_ident())
        self.log.append(f"step {step.step}")
        if step.step == 13:
            raise ArithmeticError("thirteen")
        return ExecutorOutput(step.step, [0], [0], [step.step])

    def read_blocks(self, group, block_ids, memory):
        self.log.append("out")
        for index, block_id in enumerate(block_ids):
            memory[index * ROW_BYTES : (index + 1) * ROW_BYTES] = self.blocks[block_id]

    def write_blocks(self, group, block_ids, memory):
        self.log.append("in")
        for index, block_id in enumerate(block_ids):
            self.blocks[block_id] = bytes(memory[index * ROW_BYTES : (index + 1) * ROW_BYTES])


def step(number):
    return SchedulerOutput(number, (), ContinuedRows())


@pytest.fixture
def runner():
    return RecordingRunner()


@pytest.fixture
def executor(runner):
    executor = ExecutorThread(runner)
    yield executor
    runner.gate.set()
    assert executor.close(timeout_s=60)


def test_two_steps_and_the_copies_between_them_run_in_the_order_of_submission(runner, executor):
    runner.gate.clear()
    first = executor.submit(step(1))
    copied_in = executor.copy_in("target", [7, 8], memoryview(b"abcdefgh"))
    second = executor.submit(step(2))
    staging = bytearray(ROW_BYTES)
    copied_out = executor.copy_out("target", [8], memoryview(staging))
    assert not first.done()
    assert not second.wait(timeout_s=0.0)
    runner.gate.set()
    assert executor.collect(second).token_ids == [2]
    assert executor.collect(first).token_ids == [1]
    assert copied_out.wait(timeout_s=60)
    assert copied_in.done()
    assert staging == b"efgh"
    assert runner.log == ["step 1", "in", "step 2", "out"]
    assert runner.threads.isdisjoint({threading.get_ident()})


def test_collect_raises_what_the_step_raised_and_nothing_runs_afterwards(runner, executor):
    runner.gate.clear()
    good, bad, queued = executor.submit(step(1)), executor.submit(step(13)), executor.submit(step(14))
    copy = executor.copy_in("target", [0], memoryview(b"abcd"))
    runner.gate.set()
    assert executor.collect(good).step == 1
    with pytest.raises(ArithmeticError, match="thirteen"):
        executor.collect(bad)
    with pytest.raises(ExecutorFailedError, match="ArithmeticError: thirteen"):
        executor.collect(queued)
    assert copy.wait(timeout_s=60)
    assert isinstance(copy.error, ExecutorFailedError)
    with pytest.raises(ExecutorFailedError, match="thirteen") as caught:
        executor.submit(step(15))
    assert isinstance(caught.value.__cause__, ArithmeticError)
    with pytest.raises(ExecutorFailedError):
        executor.copy_out("target", [0], memoryview(bytearray(ROW_BYTES)))
    assert runner.log == ["step 1", "step 13"]
    assert runner.blocks == {}


def test_a_copy_that_raises_shows_its_error_and_fails_the_executor(executor):
    ticket = executor.copy_out("target", [5], memoryview(bytearray(ROW_BYTES)))
    assert ticket.wait(timeout_s=60)
    assert isinstance(ticket.error, KeyError)
    with pytest.raises(ExecutorFailedError):
        executor.submit(step(1))


@pytest.mark.parametrize(
    ("group", "block_ids", "memory", "message"),
    [
        ("draft", [0], bytearray(ROW_BYTES), "no KV group 'draft'"),
        ("target", [0, 1], bytearray(ROW_BYTES), "4 bytes of memory for 2 rows of 4 bytes"),
        ("target", [0], b"abcd", "writable"),
    ],
)
def test_a_wrong_copy_is_refused_at_once_and_harms_nothing(executor, group, block_ids, memory, message):
    with pytest.raises(ValueError, match=message):
        executor.copy_out(group, block_ids, memoryview(memory))
    assert executor.collect(executor.submit(step(1))).step == 1


def test_close_runs_what_is_queued_and_refuses_the_rest(runner):
    executor = ExecutorThread(runner)
    runner.gate.clear()
    tickets = [executor.submit(step(number)) for number in range(3)]
    assert not executor.close(timeout_s=0.0)
    with pytest.raises(ExecutorClosedError):
        executor.submit(step(9))
    runner.gate.set()
    assert executor.close(timeout_s=60)
    assert [ticket.result().step for ticket in tickets] == [0, 1, 2]


class OnDevice:
    """What a device works on until ``finish`` is set."""

    def __init__(self, result, error=None):
        self.finish = threading.Event()
        self.num_taken = 0
        self._result, self._error = result, error

    def done(self):
        return self.finish.is_set()

    def result(self):
        self.finish.wait()
        self.num_taken += 1
        if self._error is not None:
            raise self._error
        return self._result


class LaunchingRunner(RecordingRunner):
    """Hands steps and copies out to a device; step 13 fails there."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = []

    def execute(self, step):
        error = ArithmeticError("on the device") if step.step == 13 else None
        self.launched.append(OnDevice(ExecutorOutput(step.step, [0], [0], [step.step]), error))
        return self.launched[-1]

    def read_blocks(self, group, block_ids, memory):
        super().read_blocks(group, block_ids, memory)
        self.launched.append(OnDevice(None))
        return self.launched[-1]


@pytest.fixture
def launching():
    runner = LaunchingRunner()
    executor = ExecutorThread(runner)
    yield runner, executor
    for each in runner.launched:
        each.finish.set()
    assert executor.close(60)


def wait_for(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_the_thread_launches_the_next_step_while_the_device_has_the_first(launching):
    runner, executor = launching
    tickets = [executor.submit(step(number)) for number in range(3)]
    wait_for(lambda: len(runner.launched) == 3)
    assert not any(ticket.done() for ticket in tickets)
    assert not tickets[0].wait(0.01)
    assert tickets[0].error is None, "asking waits for nothing"
    runner.launched[0].finish.set()
    assert tickets[0].done()
    assert executor.collect(tickets[0]).token_ids == [0]
    assert executor.collect(tickets[0]).token_ids == [0], "may be asked again"
    assert runner.launched[0].num_taken == 1
    assert not tickets[1].done()
    runner.launched[2].finish.set()
    assert executor.collect(tickets[2]).token_ids == [2]


def test_a_copy_is_done_when_the_device_is(launching):
    runner, executor = launching
    runner.blocks[5] = b"five"
    memory = executor.host_memory(ROW_BYTES)
    ticket = executor.copy_out("target", [5], memory)
    wait_for(lambda: runner.launched)
    assert not ticket.done()
    threading.Timer(0.01, runner.launched[0].finish.set).start()
    assert ticket.wait(60)
    assert ticket.error is None
    assert bytes(memory) == b"five"


def test_what_fails_on_the_device_is_raised_where_it_is_collected(launching):
    runner, executor = launching
    ticket = executor.submit(step(13))
    wait_for(lambda: runner.launched)
    runner.launched[0].finish.set()
    assert ticket.wait()
    assert isinstance(ticket.error, ArithmeticError)
    with pytest.raises(ArithmeticError, match="on the device"):
        executor.collect(ticket)
