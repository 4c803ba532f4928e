"""The threads that load the text model, render templates and tokenise, so that the poller never waits for a long chat."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from zlib import crc32

from kvd.transport.bodies import TextJob, TextResult, run_text_job
from kvd.transport.ports import Text


class TextThreads:
    """A peer's jobs all go to one thread, so they run in order. The session bounds how many wait."""

    def __init__(
        self,
        num_threads: int,
        *,
        load: Callable[[], Text],
        date: str,
        on_loaded: Callable[[Text], None],
        on_failed: Callable[[BaseException], None],
        on_result: Callable[[TextResult], None],
    ) -> None:
        """The three callbacks are called on a text thread; ``on_failed`` means that the model can't be loaded or that a thread has died."""
        self._load = load
        self._date = date
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._on_result = on_result
        self._text: Text | None = None
        self._is_loaded = threading.Event()
        self._queues: list[queue.SimpleQueue[TextJob | None]] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"kvd-text-{index}", daemon=True) for index in range(num_threads)
        ]

    def start(self) -> None:
        """Start the threads; the first loads the model."""
        for thread in self._threads:
            thread.start()

    def submit(self, job: TextJob) -> None:
        """Queue a job; never blocks."""
        self._queues[crc32(job.peer) % len(self._queues)].put(job)

    def stop(self) -> None:
        """Let the threads end after the jobs they are at. They are daemon threads: nothing waits for a long one."""
        for each in self._queues:
            each.put(None)

    def _run(self, index: int) -> None:
        try:
            self._work(index)
        except BaseException as error:
            self._on_failed(error)

    def _work(self, index: int) -> None:
        if index == 0:
            self._text = self._load()
            self._is_loaded.set()
            self._on_loaded(self._text)
        while (job := self._queues[index].get()) is not None:
            self._is_loaded.wait()
            assert self._text is not None
            self._on_result(run_text_job(job, self._text, self._date))
