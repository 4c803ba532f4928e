"""How far the start is, in words: the weights on one thread, the blocks on another, each told as it goes on."""

from __future__ import annotations

from collections.abc import Callable

from kvd.engine.ports import Clock

_BLOCKS_INTERVAL_S = 0.25


class StartProgress:
    """``text`` says what is under way. ``on_weights`` is the loading thread's, the rest the rehydrating one's.

    Args:
        manager: hears each line, with its own idea of how often is enough.
        publish: called when ``text`` has changed: at each percent of the weights, and a few times a second for the blocks.
    """

    def __init__(self, manager: Callable[[str], None], publish: Callable[[], None], clock: Clock) -> None:
        self._manager = manager
        self._publish = publish
        self._clock = clock
        self._weights = ""
        self._blocks = ""
        self._next_blocks_s = 0.0

    @property
    def text(self) -> str:
        """Both, as far as they are under way; empty if neither is."""
        return "; ".join(filter(None, (self._weights, self._blocks)))

    def on_weights(self, text: str) -> None:
        self._manager(text)
        if text != self._weights:
            self._weights = text
            self._publish()

    def on_blocks(self, done: int, total: int) -> None:
        self._blocks = f"rehydrating: {done} of {total} blocks"
        self._manager(self._blocks)
        if (now := self._clock.monotonic()) >= self._next_blocks_s:
            self._next_blocks_s = now + _BLOCKS_INTERVAL_S
            self._publish()

    def blocks_are_back(self) -> None:
        """The weights may still be loading."""
        self._blocks = ""
        self._publish()
