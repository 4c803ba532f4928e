"""Whether blocks are quicker read from disk than computed again, by what was measured so far.

A load of n bytes takes *latency + n ÷ rate*; both come from the loads themselves, as the line through them by least squares with exponentially decaying weights. Until
there was one, the rehydration's bytes and seconds stand for the rate. Computing takes *tokens ÷ prefill rate*, the average over the steps, weighted by their tokens.
What has not been measured yet is tried: there is no other way to measure it.
"""

from __future__ import annotations

import math

_KEPT = 0.9
"""Weight of what was measured before, at each further load."""
_MIN_SPREAD = 1e-3
"""Loads of (almost) one size, by the relative variance of their bytes, say nothing about a line."""
_PREFILL_MEMORY_TOKENS = 4096
_PROBE_EVERY = 32
_PROBE_BLOCKS = 8
_MIN_REHYDRATION_BYTES = 1 << 20


class LoadCost:
    """``always``: load whatever is there. Numbers are written and read by the engine thread alone."""

    def __init__(self, block_bytes: int, block_size_tokens: int, *, always: bool) -> None:
        self._block_bytes = block_bytes
        self._block_size_tokens = block_size_tokens
        self._always = always
        self._weight = self._bytes = self._seconds = self._bytes_squared = self._bytes_seconds = 0.0
        self._num_refused = 0
        self.seconds_per_byte: float | None = None
        self.latency_s = 0.0
        self.prefill_tokens_per_s: float | None = None

    def note_rehydration(self, num_bytes: int, seconds: float) -> None:
        """What the start has read, if it was enough to say something."""
        if num_bytes >= _MIN_REHYDRATION_BYTES and seconds > 0:
            self._add(num_bytes, seconds)

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """A load that read all that it was to read, from its first read to the bytes' arrival in the pool."""
        self._add(num_bytes, seconds)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts. Those of less than a block are passed over: they tell of the step, not of its tokens."""
        if num_tokens < self._block_size_tokens or seconds <= 0:
            return
        rate = num_tokens / seconds
        before = self.prefill_tokens_per_s
        share = 1.0 if before is None else 1.0 - math.exp(-num_tokens / _PREFILL_MEMORY_TOKENS)
        self.prefill_tokens_per_s = rate if before is None else before + share * (rate - before)

    def num_worth_loading(self, num_blocks: int, num_blocks_ahead: int) -> int:
        """How many of ``num_blocks`` to load, with so many of other loads to be read before: all of them or none.

        Now and then a few are loaded all the same, lest a disk that was slow once be never tried again.
        """
        if self._always or self._is_quicker(num_blocks, num_blocks_ahead):
            return num_blocks
        self._num_refused += 1
        return min(num_blocks, _PROBE_BLOCKS) if self._num_refused % _PROBE_EVERY == 0 else 0

    def _is_quicker(self, num_blocks: int, num_blocks_ahead: int) -> bool:
        if self.seconds_per_byte is None or self.prefill_tokens_per_s is None:
            return True
        load_s = self.latency_s + (num_blocks + num_blocks_ahead) * self._block_bytes * self.seconds_per_byte
        return load_s < num_blocks * self._block_size_tokens / self.prefill_tokens_per_s

    def _add(self, num_bytes: int, seconds: float) -> None:
        self._weight = self._weight * _KEPT + 1.0
        self._bytes = self._bytes * _KEPT + num_bytes
        self._seconds = self._seconds * _KEPT + seconds
        self._bytes_squared = self._bytes_squared * _KEPT + num_bytes * num_bytes
        self._bytes_seconds = self._bytes_seconds * _KEPT + num_bytes * seconds
        mean_bytes, mean_s = self._bytes / self._weight, self._seconds / self._weight
        variance = self._bytes_squared / self._weight - mean_bytes * mean_bytes
        slope = -1.0
        if variance > _MIN_SPREAD * mean_bytes * mean_bytes:
            slope = (self._bytes_seconds / self._weight - mean_bytes * mean_s) / variance
        if slope < 0 or slope * mean_bytes > mean_s:  # no line, or one with a negative part
            slope = mean_s / mean_bytes
        self.seconds_per_byte = slope
        self.latency_s = max(0.0, mean_s - slope * mean_bytes)
