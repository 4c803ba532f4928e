"""What the edge's own part of a request leaves of the times that it named."""

from __future__ import annotations

from kvd_client.protocol.messages import Generate

from kvd.transport.errors import RequestError
from kvd.types import ErrorCode

_RETRY_AFTER_S = 1.0


def times_left(message: Generate, waited_s: float) -> tuple[float, float]:
    """``deadline_s`` and ``queue_timeout_s`` (0: none) from now on, ``waited_s`` after the request's arrival.

    Raises:
        RequestError: ``deadline_exceeded`` or ``queue_timeout``, if its prompt took longer to be rendered and tokenised.
    """
    if message.deadline_s and waited_s >= message.deadline_s:
        raise RequestError(ErrorCode.DEADLINE_EXCEEDED, "the prompt was not tokenised within deadline_s")
    if message.queue_timeout_s and waited_s >= message.queue_timeout_s:
        reason = "the prompt was not tokenised within queue_timeout_s"
        raise RequestError(ErrorCode.QUEUE_TIMEOUT, reason, retry_after_s=_RETRY_AFTER_S)
    return max(0.0, message.deadline_s - waited_s), max(0.0, message.queue_timeout_s - waited_s)
