"""What is told of a prompt: its tokens and text, and its log-probabilities in messages that fit their headers."""

from __future__ import annotations

from collections.abc import Iterator

from kvd_client.protocol.messages import Prompt, TokenLogprob

from kvd.commands import PromptLogprobsOut
from kvd.types import TokenLogprobs

_MAX_PAIRS = 2048
"""(token id, log-probability) pairs of a message: at most 15 bytes each, half a header."""


def prompt_messages(event: PromptLogprobsOut) -> Iterator[Prompt]:
    """The ``prompt`` messages, without bodies, that tell an event's log-probabilities in order."""
    first, some, num_pairs = event.first_position, list[TokenLogprob](), 0
    for entry in event.logprobs:
        size = 1 + len(entry.top)
        if some and num_pairs + size > _MAX_PAIRS:
            yield Prompt(request_id=event.request_id, first_position=first, logprobs=tuple(some))
            first, some, num_pairs = first + len(some), [], 0
        some.append(wire_logprob(entry))
        num_pairs += size
    if some:
        yield Prompt(request_id=event.request_id, first_position=first, logprobs=tuple(some))


def wire_logprob(entry: TokenLogprobs) -> TokenLogprob:
    """An entry in the wire's form."""
    return TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=entry.top)
