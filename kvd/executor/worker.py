"""The executor's one thread and its one FIFO queue: steps, copy-out and copy-in run in the order in which they were handed over.

``ExecutorThread`` fits the engine's ``Executor`` port and storage's ``BlockIO`` port. It knows no tensor: a *runner* (torch or fake) does
the work. Any thread may hand work over; several steps may be in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any, Protocol, cast, runtime_checkable

from kvd.executor.host_memory import map_memory
from kvd.observe.failpoints import declare, failpoint
from kvd.step import ExecutorOutput, SchedulerOutput
from kvd.types import BlockId, KvGroup

declare("executor.step")

QUEUE_CAPACITY = 64
"""Items that may wait. Steps in flight and staged copies stay far below it; a caller beyond it sleeps until the thread has caught up."""

_DEVICE_POLL_S = 0.0005


class ExecutorError(Exception):
    """The executor room's base error."""


class ExecutorFailedError(ExecutorError):
    """An earlier item raised: the state of rows and pool is unknown, nothing further runs. ``__cause__`` is what was raised."""


class ExecutorClosedError(ExecutorError):
    """Work was handed over after ``close``."""


@runtime_checkable
class Later(Protocol):
    """What a device still works on, in the order of the queue; any one thread at a time may ask."""

    def done(self) -> bool: ...

    def result(self) -> Any:
        """Wait for the device; raises what went wrong there."""


class BlockCopies(Protocol):
    """Copies between a pool's rows and memory: done when the call returns (a pool itself), or later."""

    def read_blocks(self, block_ids: Sequence[BlockId], memory: memoryview) -> Later | None: ...

    def write_blocks(self, block_ids: Sequence[BlockId], memory: memoryview) -> Later | None: ...


class Runner(Protocol):
    """What the thread drives; called from that thread alone, except ``groups``.

    A runner on a device of its own need not wait for it: it returns a ``Later`` when the work is in the device's queue.
    """

    def groups(self) -> tuple[KvGroup, ...]: ...

    def execute(self, step: SchedulerOutput) -> ExecutorOutput | Later: ...

    def read_blocks(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> Later | None: ...

    def write_blocks(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> Later | None: ...


class WorkTicket:
    """One item of the queue: not done, or done with a result or an error; or launched, and done when the device is.

    What a device still works on is taken by whoever asks first, one thread at a time.
    """

    __slots__ = ("_error", "_handled", "_later", "_lock", "_result")

    def __init__(self) -> None:
        self._handled = threading.Event()
        self._lock = threading.Lock()
        self._later: Later | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """What the item raised, once it is done."""
        if self.done():
            self._settle()
        return self._error

    def done(self) -> bool:
        if not self._handled.is_set():
            return False
        later = self._later
        try:
            return later is None or later.done()
        except Exception:  # a device that has failed says so at every question; ``result`` will tell
            return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until the item is done or the time is over; whether it is done. Raises nothing of the item's."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._handled.wait(timeout_s):
            return False
        while deadline_s is not None and not self.done():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_DEVICE_POLL_S)
        self._settle()
        return True

    def result(self) -> Any:
        """Wait; the item's result, or whatever it raised."""
        self._handled.wait()
        self._settle()
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self, result: Any, error: BaseException | None) -> None:
        """The thread's word on the item, once."""
        self._result = result
        self._error = error
        self._handled.set()

    def launched(self, later: Later) -> None:
        """Instead of ``finish``: a device has the item."""
        self._later = later
        self._handled.set()

    def _settle(self) -> None:
        if self._later is None:
            return
        with self._lock:
            if self._later is not None:
                try:
                    self._result = self._later.result()
                except Exception as error:
                    self._error = error
                self._later = None


class ExecutorThread:
    """Runs ``runner`` on a daemon thread of its own. The thread launches what a device computes and does not wait for it: whoever holds the ticket does.

    After an item raised, every later item, queued or handed over afterwards, fails with ``ExecutorFailedError``.
    """

    def __init__(self, runner: Runner, host_memory: Callable[[int], memoryview] = map_memory) -> None:
        self._runner = runner
        self.host_memory = host_memory
        """Makes writable memory of so many bytes that blocks are copied to and from at full speed."""
        self._groups = runner.groups()
        self._row_bytes = {group.name: group.row_bytes for group in self._groups}
        self._queue: Queue[tuple[WorkTicket, Callable[[], Any]] | None] = Queue(QUEUE_CAPACITY)
        self._failure: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvd-executor", daemon=True)
        self._thread.start()

    def groups(self) -> tuple[KvGroup, ...]:
        return self._groups

    def submit(self, step: SchedulerOutput) -> WorkTicket:
        """Hand a step over; returns at once.

        Raises:
            ExecutorFailedError: an earlier item raised.
            ExecutorClosedError: after ``close``.
        """
        return self._put(lambda: self._execute(step))

    def collect(self, ticket: Any) -> ExecutorOutput:
        """Wait for the result of a ``submit``; raises what the step raised."""
        return cast("ExecutorOutput", ticket.result())

    def copy_out(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> WorkTicket:
        """Copy the rows of ``block_ids`` into writable ``memory``, ``len(block_ids) * row_bytes`` long.

        Raises:
            ValueError: unknown group, wrong length, or memory that can't be written.
            ExecutorFailedError, ExecutorClosedError: as ``submit``.
        """
        self._check(group, block_ids, memory)
        if memory.readonly:
            raise ValueError("copy_out needs writable memory")
        ids = tuple(block_ids)
        return self._put(lambda: self._runner.read_blocks(group, ids, memory))

    def copy_in(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> WorkTicket:
        """Copy ``memory`` into the rows of ``block_ids``; errors as ``copy_out``."""
        self._check(group, block_ids, memory)
        ids = tuple(block_ids)
        return self._put(lambda: self._runner.write_blocks(group, ids, memory))

    def call(self, work: Callable[[], None]) -> WorkTicket:
        """Do something after all steps that were handed over before, and before those that come after; errors as ``submit``."""
        return self._put(work)

    def close(self, timeout_s: float | None = None) -> bool:
        """Let everything queued run, then end the thread; whether it ended within the time. May be called again."""
        with self._lock:
            first = not self._closed
            self._closed = True
        if first:
            self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _check(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> None:
        row_bytes = self._row_bytes.get(group)
        if row_bytes is None:
            raise ValueError(f"no KV group {group!r}; there are {', '.join(self._row_bytes)}")
        if memory.nbytes != len(block_ids) * row_bytes:
            raise ValueError(f"{memory.nbytes} bytes of memory for {len(block_ids)} rows of {row_bytes} bytes")

    def _execute(self, step: SchedulerOutput) -> ExecutorOutput | Later:
        failpoint("executor.step")
        return self._runner.execute(step)

    def _put(self, work: Callable[[], Any]) -> WorkTicket:
        ticket = WorkTicket()
        with self._lock:  # held over the put, so that nothing lands behind the end mark and waits forever
            if self._failure is not None:
                raise _failed(self._failure)
            if self._closed:
                raise ExecutorClosedError("the executor is closed")
            self._queue.put((ticket, work))
        return ticket

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            ticket, work = item
            if self._failure is not None:
                ticket.finish(None, _failed(self._failure))
                continue
            try:
                result = work()
            except BaseException as error:
                self._failure = error
                ticket.finish(None, error)
            else:
                if isinstance(result, Later):
                    ticket.launched(result)
                else:
                    ticket.finish(result, None)
                del result
            del item, ticket, work  # an idle thread must not keep a step's or a copy's memory alive


def _failed(cause: BaseException) -> ExecutorFailedError:
    error = ExecutorFailedError(f"an earlier step or copy raised {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
