"""Every error that a call can raise, one class per family.

All of them derive from :class:`KvdError` and carry ``code`` (a word of ``kvd_client.protocol.codes.Code``, or one of the client's own:
``connection_lost``, ``interrupted``, ``timeout``, ``authentication_failed``, ``closed``), ``retryable`` and ``retry_after_s``. A program
that only wants to know whether trying again makes sense looks at ``retryable``.
"""

# ruff: noqa: N818 - the names say what happened; `Overloaded` reads better in an except clause than `OverloadedError`

from __future__ import annotations

from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Failed


class KvdError(Exception):
    """A call that failed. Raised itself for a code that this version of the client doesn't know.

    Attributes:
        code: the daemon's failure code, or one of the client's own.
        retryable: whether the same call may succeed later, here or on the restarted daemon.
        retry_after_s: seconds after which the daemon suggests to try again; 0 where it suggests nothing.
    """

    def __init__(self, message: str, *, code: str, retryable: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.code}: {self.args[0]}"


class BadRequest(KvdError):
    """``bad_request``: a parameter or a body is wrong; the message names it."""


class TooLarge(BadRequest):
    """``too_large``: the message exceeds the daemon's limits (also found by the client, before it sends)."""


class PromptTooLong(BadRequest):
    """``prompt_too_long``: the prompt leaves no room for output within the daemon's ``max_model_len``."""


class KvCapacity(BadRequest):
    """``kv_capacity``: the request can never fit the daemon's KV pool; the message gives the numbers."""


class UnsupportedVersion(KvdError):
    """``unsupported_version`` or ``unknown_type``: daemon and client don't speak the same protocol."""


class Duplicate(KvdError):
    """``duplicate``: the daemon has answered this request id already."""


class NotReady(KvdError):
    """``starting``: the daemon loads, rehydrates or warms up. Waited for by default, see ``wait_until_ready``."""


class Draining(KvdError):
    """``draining``: the daemon is about to exit and accepts nothing new. Waited for by default, see ``wait_until_ready``."""


class Overloaded(KvdError):
    """``overloaded``: a queue of the daemon is full. Never retried by the client: the caller decides about load."""


class QueueTimeout(Overloaded):
    """``queue_timeout``: the request had not begun to run within its ``queue_timeout_s``."""


class DeadlineExceeded(KvdError, TimeoutError):
    """``deadline_exceeded``: the request was not over within its ``deadline_s``. What was read of its stream stays valid."""


class PinCapacity(KvdError):
    """``pin_capacity``: the pin would exceed the fraction of the KV pool that pins may hold; the message gives the numbers."""


class AdapterCapacity(Overloaded):
    """``adapter_capacity``: every adapter that may be loaded is in use; there is room when one of them is unloaded or its requests are over."""


class AdapterUnusable(BadRequest):
    """``adapter_unusable``: the adapter's directory can't be read, does not fit the model or wants what is not computed; the message says what."""


class PinTooShort(BadRequest):
    """``pin_too_short``: the prefix is shorter than one block."""


class NotFound(KvdError):
    """``not_found``: there is no pin or request of that name."""


class ClientTooSlow(KvdError):
    """``client_too_slow``: the stream was not read for longer than the daemon's ``stall_timeout_s``."""


class EngineError(KvdError):
    """``engine_error``: the step that ran this request failed; the daemon restarts warm."""


class NonfiniteLogits(EngineError):
    """``nonfinite_logits``: the model gave NaN or infinity for this request alone."""


class StorageError(KvdError):
    """``storage_error``: a recipe or checkpoint could not be made durable."""


class InternalError(KvdError):
    """``internal``: a fault of the daemon, or an answer that breaks the protocol."""


class ConnectionLost(KvdError, ConnectionError):
    """``connection_lost``: no daemon answers at the endpoint, or it vanished while it held an operation that must not be sent twice."""

    def __init__(self, message: str, *, code: str = "connection_lost", retryable: bool = True, retry_after_s: float = 0.0) -> None:
        super().__init__(message, code=code, retryable=retryable, retry_after_s=retry_after_s)


class Interrupted(ConnectionLost):
    """``interrupted``: the daemon vanished after the stream had begun. What was read stays valid; the rest has to be asked for anew."""

    def __init__(self, message: str, *, code: str = "interrupted", retryable: bool = True, retry_after_s: float = 0.0) -> None:
        super().__init__(message, code=code, retryable=retryable, retry_after_s=retry_after_s)


class AuthenticationFailed(KvdError):
    """``authentication_failed``: the daemon refused the client's CURVE key, or only one of the two wants CURVE."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="authentication_failed")


class Timeout(KvdError, TimeoutError):
    """``timeout``: the call was not over within ``timeout_s``. The request is aborted in the daemon."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="timeout", retryable=True)


class ClientClosed(KvdError):
    """``closed``: the client was closed before the call was over."""

    def __init__(self, message: str = "the client is closed") -> None:
        super().__init__(message, code="closed")


_BY_CODE: dict[str, type[KvdError]] = {
    Code.BAD_REQUEST: BadRequest,
    Code.UNSUPPORTED_VERSION: UnsupportedVersion,
    Code.UNKNOWN_TYPE: UnsupportedVersion,
    Code.TOO_LARGE: TooLarge,
    Code.DUPLICATE: Duplicate,
    Code.STARTING: NotReady,
    Code.DRAINING: Draining,
    Code.OVERLOADED: Overloaded,
    Code.PROMPT_TOO_LONG: PromptTooLong,
    Code.KV_CAPACITY: KvCapacity,
    Code.QUEUE_TIMEOUT: QueueTimeout,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.PIN_CAPACITY: PinCapacity,
    Code.ADAPTER_CAPACITY: AdapterCapacity,
    Code.ADAPTER_UNUSABLE: AdapterUnusable,
    Code.PIN_TOO_SHORT: PinTooShort,
    Code.NOT_FOUND: NotFound,
    Code.CLIENT_TOO_SLOW: ClientTooSlow,
    Code.NONFINITE_LOGITS: NonfiniteLogits,
    Code.ENGINE_ERROR: EngineError,
    Code.STORAGE_ERROR: StorageError,
    Code.INTERNAL: InternalError,
}


def error_of(failed: Failed) -> KvdError:
    """The typed error of a ``failed`` message; an unknown code gives a plain :class:`KvdError`."""
    kind = _BY_CODE.get(failed.code, KvdError)
    return kind(failed.message, code=failed.code, retryable=failed.retryable, retry_after_s=failed.retry_after_s)
