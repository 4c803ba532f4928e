"""The model's weights on a thread of their own, beside the rehydration."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvd.observe.progress import Progress


class Loading(threading.Thread):
    """Runs ``load(progress)``; ``tell`` hears, in words, how far it is."""

    def __init__(self, load: Callable[[Callable[[int, int], None]], None], tell: Callable[[str], None]) -> None:
        super().__init__(name="kvd-weights", daemon=True)
        self._load = load
        self._tell = tell
        self._error: BaseException | None = None
        self._done = threading.Event()

    @property
    def is_loading(self) -> bool:
        """Not ``is_alive``: a ``join`` that a signal interrupted takes the thread for dead."""
        return self.ident is not None and not self._done.is_set()

    def run(self) -> None:
        bar = Progress("loading weights")

        def progress(done: int, total: int) -> None:
            bar.update(done, total)
            self._tell(f"loading weights: {done * 100 // max(total, 1)} %")

        try:
            self._load(progress)
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            bar.close()
            self._done.set()

    def finish(self) -> None:
        """Wait for the end; raises what the loading raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
