"""One choice's stream: from sampled ids to text that is final, with stop strings cut out. Sees no socket and no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.text.stop import StopMatcher
from kvd.transport.ports import Detokenizer
from kvd.types import FinishReason, PackedTokens, TokenLogprobs, pack_tokens, unpack_tokens


class StreamGapError(Exception):
    """The engine's tokens do not follow on those before: a fault of the daemon."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one ``TokensOut`` adds to a choice."""

    first_index: int
    token_ids: PackedTokens
    num_tokens: int
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    num_dropped: int = 0
    """Tokens after the one that completed a stop string."""


class ChoiceStream:
    """State of one choice at the edge.

    ``num_tokens`` counts output tokens up to and including the one that completed a stop string; those after it never happened.
    The last token's text is dropped if it is one of ``silent_ids`` (end of sequence, stop token ids): it ended the choice, it says nothing.
    A stop string counts if a token completes it that comes after the first ``min_tokens``, as an end of sequence does.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_silent_ids", "choice", "cumulative_logprob", "finish_reason", "num_tokens")

    def __init__(
        self,
        choice: int,
        *,
        detokenizer: Detokenizer | None,
        stops: Sequence[str],
        silent_ids: frozenset[int],
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Without a detokenizer (no text asked for, no stop strings) ids pass as they are. ``include_stop``: the text ends with the stop string, not before it."""
        self.choice = choice
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.cumulative_logprob: float | None = None
        """Of the tokens that were counted, nats; None where none came with its log-probability."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._silent_ids = silent_ids

    def push(self, first_index: int, packed: PackedTokens, logprobs: tuple[TokenLogprobs, ...] | None) -> Delta:
        """Take the engine's next tokens.

        Raises:
            StreamGapError: ``first_index`` is not the number of tokens taken so far.
        """
        num_tokens = len(packed) // 4
        if self.finish_reason is not None:
            return Delta(self.num_tokens, b"", 0, "", (), num_dropped=num_tokens)
        if first_index != self.num_tokens:
            raise StreamGapError(f"choice {self.choice}: token {first_index} came after {self.num_tokens} tokens")
        token_ids: Sequence[int] = unpack_tokens(packed) if self._detokenizer is not None else ()
        if self._matcher is not None:
            text, num_counted = self._match(token_ids)
        else:
            text, num_counted = self._plain(token_ids), num_tokens
        self.num_tokens += num_counted
        if num_counted < num_tokens:
            packed = pack_tokens(token_ids[:num_counted])
            logprobs = logprobs[:num_counted] if logprobs else None
        if logprobs:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(entry.logprob for entry in logprobs)
        return Delta(first_index, packed, num_counted, text, logprobs or (), num_dropped=num_tokens - num_counted)

    def finish(self, reason: str) -> str:
        """End the choice for the engine's ``reason`` (an earlier stop string stays the reason); the text not yet given out."""
        if self.finish_reason is not None:
            return ""
        self.finish_reason = reason
        if self._detokenizer is None:
            return ""
        tail = self._detokenizer.flush()
        if self._matcher is None:
            return tail
        final, matched = self._matcher.push(tail, may_end=self.num_tokens > self._min_tokens)
        if matched:
            self.finish_reason = FinishReason.STOP
            return final
        return final + self._matcher.flush()

    def _plain(self, token_ids: Sequence[int]) -> str:
        if self._detokenizer is None:
            return ""
        if token_ids and token_ids[-1] in self._silent_ids:
            token_ids = token_ids[:-1]
        return self._detokenizer.push(token_ids)

    def _match(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Token by token, so that the one which completed a stop string is known."""
        assert self._detokenizer is not None
        assert self._matcher is not None
        pieces = []
        for position, token_id in enumerate(token_ids):
            if token_id in self._silent_ids and position == len(token_ids) - 1:
                break
            may_end = self.num_tokens + position >= self._min_tokens
            final, matched = self._matcher.push(self._detokenizer.push((token_id,)), may_end=may_end)
            pieces.append(final)
            if matched:
                self.finish_reason = FinishReason.STOP
                return "".join(pieces), position + 1
        return "".join(pieces), len(token_ids)
