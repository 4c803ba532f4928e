"""What the start does on threads of their own: nearly all that takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvd.observe.progress import Progress

_LOOK_S = 0.05

T = TypeVar("T")


class StartThread(threading.Thread, Generic[T]):
    """Runs ``work``. The main thread waits, and looks now and then whether the start is to end. A signal's exception, raised wherever that thread is, could
    leave a lock held that another thread needs (a ``Condition``'s, the import lock), or strike in a callback of C++, which ends the process over it.
    """

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._returned: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

    @property
    def is_running(self) -> bool:
        """Not ``is_alive``: a ``join`` that a signal interrupted takes the thread for dead."""
        return self.ident is not None and not self._done.is_set()

    def run(self) -> None:
        try:
            self._returned.append(self._work())
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self._done.set()

    def finish(self, check: Callable[[], Any]) -> T:
        """Wait for the end; what the work returned. Raises what it raised, or what ``check`` does, which is called a few times a second."""
        while not self._done.wait(_LOOK_S):
            check()
        check()
        if self._error is not None:
            raise self._error
        return self._returned[0]

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time, or never began."""
        return self.ident is None or self._done.wait(timeout_s)


class Loading(StartThread[None]):
    """Runs ``load(progress)``; ``tell`` hears, in words, how far it is."""

    def __init__(self, load: Callable[[Callable[[int, int], None]], None], tell: Callable[[str], None]) -> None:
        super().__init__("kvd-weights", self._run_load)
        self._load = load
        self._tell = tell

    def _run_load(self) -> None:
        bar = Progress("loading weights")

        def progress(done: int, total: int) -> None:
            bar.update(done, total)
            self._tell(f"loading weights: {done * 100 // max(total, 1)} %")

        try:
            self._load(progress)
        finally:
            bar.close()
