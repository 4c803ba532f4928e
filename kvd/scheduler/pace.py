"""How many prompt tokens a step may have beside running streams, so that these wait at most ``max_inter_token_ms`` for their next token.

A step's time is taken as that of the decodes alone, the last time that there was such a step, plus so many milliseconds for each prompt token. The latter is measured at every
step that has any: a rise counts at once, a fall by degrees (context grows slowly, but a machine becomes busy at once). An error in either is made good by the next measurement,
for what the first leaves out the second contains: the sequence of chunk sizes converges on the bound. Nothing here looks at a clock; the same measured times give the same steps.
"""

from __future__ import annotations

FLOOR_TOKENS = 16
"""A prompt gets on by so many tokens a step, whatever the bound: else it would never begin."""

_FIRST_TOKENS = 64
"""Before anything is measured."""
_MARGIN = 0.9
"""Part of the bound that is planned for: steps differ."""
_SMOOTHING = 0.25
_GROWTH = 2
"""A step has at most so many times the prompt tokens of the one measured last: cost per token is not the same at every size."""


class Pace:
    """The step times of one executor. ``max_inter_token_s`` 0: prompts take what the step's budget leaves them."""

    __slots__ = ("_chunk_tokens", "_decode_s", "_last_tokens", "_max_step_s", "_token_s")

    def __init__(self, max_inter_token_s: float) -> None:
        self._max_step_s = max_inter_token_s * _MARGIN
        self._decode_s = 0.0
        self._token_s = 0.0
        self._last_tokens = 0
        self._chunk_tokens: dict[int, int] = {}

    def limit(self, num_tokens: int) -> int:
        """Of ``num_tokens`` that prompts could have in a step beside streams, how many they get."""
        if not self._max_step_s:
            return num_tokens
        if not self._last_tokens:
            return min(num_tokens, _FIRST_TOKENS)
        left_s = self._max_step_s - self._decode_s
        affordable = int(left_s / self._token_s) if self._token_s > 0 else num_tokens
        return min(num_tokens, max(FLOOR_TOKENS, min(affordable, _GROWTH * self._last_tokens)))

    def begin(self, step: int, num_chunk_tokens: int) -> None:
        """A step with so many prompt tokens is on its way."""
        self._chunk_tokens[step] = num_chunk_tokens

    def end(self, step: int, seconds: float) -> None:
        """The step took so long, not counting what it waited for another one."""
        num_tokens = self._chunk_tokens.pop(step, 0)
        if not num_tokens:
            self._decode_s = _smoothed(self._decode_s, seconds)
            return
        token_s = max(0.0, seconds - self._decode_s) / num_tokens
        self._token_s = token_s if token_s > self._token_s else _smoothed(self._token_s, token_s)
        self._last_tokens = num_tokens

    def forget(self, step: int) -> None:
        """The step failed."""
        self._chunk_tokens.pop(step, None)


def _smoothed(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old) if old else new
