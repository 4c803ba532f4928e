"""The edge's errors."""

from __future__ import annotations

from kvd.types import ErrorCode


class RequestError(Exception):
    """A request or operation that is refused; becomes a ``failed`` message with this code."""

    def __init__(self, code: str, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


def bad_request(message: str) -> RequestError:
    """The request is wrong in itself; sending it again will not help."""
    return RequestError(ErrorCode.BAD_REQUEST, message)


class EndpointError(Exception):
    """An endpoint that can't or must not be opened; the message names it and says why."""


class TenantUnknownError(Exception):
    """A message whose tenant can't be told; it is not served."""


class EndpointInUseError(EndpointError):
    """Another process listens there, as a daemon that is still ending does: it may be free in a moment."""
