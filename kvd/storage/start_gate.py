"""What the start does with the storage on threads of its own, and an end that does not wait for them: one of the two lets go of everything, and only one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from kvd.storage.errors import StorageClosedError


class StartGate:
    """Thread-safe; one thread works at a time. ``let_go`` ends what was begun and gives the directory back."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        self._let_go = let_go
        self._turn = threading.Lock()
        self._is_under_way = False
        self._is_closed = False

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Around a piece of work. Where ``leave`` is called meanwhile, this thread lets go at the end, however the work ends.

        Raises:
            StorageClosedError: ``leave`` was called before.
        """
        with self._turn:
            self.check()
            self._is_under_way = True
        try:
            yield
        finally:
            with self._turn:
                self._is_under_way = False
                is_left = self._is_closed
            if is_left:
                self._let_go()

    def check(self) -> None:
        """In the middle of the work, before what nobody would need any more.

        Raises:
            StorageClosedError: ``leave`` was called.
        """
        if self._is_closed:
            raise StorageClosedError("the storage was closed during the start")

    def leave(self, last_words: Callable[[], None]) -> bool:
        """No more work. Whether some is under way, whose thread then lets go: ``last_words`` are said before, as the directory may be another's after that."""
        with self._turn:
            self._is_closed = True
            if self._is_under_way:
                last_words()
            return self._is_under_way
