"""How many prompt tokens a step may have beside running streams, so that these wait at most ``max_inter_token_ms`` for their next token.

A step's time is taken as that of the decodes alone, the last time that there was such a step, plus so many milliseconds for each prompt token. The latter is measured at every
step that has any: a rise counts at once, a fall by degrees (context grows slowly, but a machine becomes busy at once). An error in either is made good by the next measurement,
for what the first leaves out the second contains: the sequence of chunk sizes converges on the bound. Nothing here looks at a clock; the same measured times give the same steps.

Prompts always get on: by ``FLOOR_TOKENS`` a step, and by a quarter of the time that the decodes take, if these alone come near the bound or exceed it.
"""

from __future__ import annotations

FLOOR_TOKENS = 16

_FIRST_TOKENS = 64
"""Before anything is measured."""
_MARGIN = 0.9
"""Part of the bound that is planned for: steps differ."""
_LEAST_PART = 1.25
"""A step may take so many times as long as its decodes, whatever the bound."""
_SMOOTHING = 0.25
_GROWTH = 2
"""A step has at most so many times the prompt tokens of the one measured last: cost per token is not the same at every size."""


class Pace:
    """The step times of one executor. ``max_inter_token_s`` 0: prompts take what the step's budget leaves them."""

    __slots__ = ("_decode_rows", "_decode_s", "_last_tokens", "_max_step_s", "_steps", "_token_s")

    def __init__(self, max_inter_token_s: float) -> None:
        self._max_step_s = max_inter_token_s * _MARGIN
        self._decode_s = 0.0
        self._decode_rows = 1
        self._token_s = 0.0
        self._last_tokens = 0
        self._steps: dict[int, tuple[int, int]] = {}

    def limit(self, num_tokens: int, num_streams: int) -> int:
        """Of ``num_tokens`` that prompts could have in a step beside so many streams, how many they get."""
        if not self._max_step_s or not num_streams:
            return num_tokens
        if not self._last_tokens:
            return min(num_tokens, _FIRST_TOKENS)
        decode_s = self._decode_s
        least_s = _LEAST_PART * decode_s * min(1.0, num_streams / self._decode_rows)
        left_s = max(self._max_step_s, least_s) - decode_s
        affordable = int(left_s / self._token_s) if self._token_s > 0 else num_tokens
        return min(num_tokens, max(FLOOR_TOKENS, min(affordable, _GROWTH * self._last_tokens)))

    def begin(self, step: int, num_tokens: int, num_streams: int) -> None:
        """A step with so many prompt tokens beside so many streams is on its way."""
        self._steps[step] = num_tokens, num_streams

    def end(self, step: int, seconds: float) -> None:
        """The step took so long, not counting what it waited for another one."""
        num_tokens, num_streams = self._steps.pop(step)
        if not num_tokens:
            self._decode_s = _smoothed(self._decode_s, seconds)
            self._decode_rows = max(1, num_streams)
            return
        decode_s = self._decode_s if num_streams else 0.0
        token_s = max(0.0, seconds - decode_s) / num_tokens
        self._token_s = token_s if token_s > self._token_s else _smoothed(self._token_s, token_s)
        self._last_tokens = num_tokens

    def forget(self, step: int) -> None:
        """The step failed."""
        self._steps.pop(step)


def _smoothed(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old) if old else new
