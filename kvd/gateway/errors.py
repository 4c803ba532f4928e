"""Failures in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}`` under an HTTP status."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from kvd_client.errors import KvdError

INVALID = "invalid_request_error"
_SERVER = "server_error"
_DEFAULT_RETRY_S = 1.0

_OF_CODE: Mapping[str, tuple[int, str, str]] = MappingProxyType(
    {
        "bad_request": (400, INVALID, "bad_request"),
        "prompt_too_long": (400, INVALID, "context_length_exceeded"),  # OpenAI's own code: clients shorten their prompts by it
        "kv_capacity": (400, INVALID, "context_length_exceeded"),
        "not_found": (404, INVALID, "model_not_found"),  # of an adapter: the only thing that a generation names
        "adapter_unusable": (400, INVALID, "adapter_unusable"),
        "too_large": (413, INVALID, "too_large"),
        "overloaded": (429, "rate_limit_error", "overloaded"),
        "queue_timeout": (503, _SERVER, "queue_timeout"),
        "deadline_exceeded": (504, _SERVER, "deadline_exceeded"),
        "starting": (503, _SERVER, "starting"),
        "draining": (503, _SERVER, "draining"),
        "engine_error": (503, _SERVER, "engine_error"),
        "connection_lost": (503, _SERVER, "connection_lost"),
        "interrupted": (503, _SERVER, "interrupted"),
        "timeout": (503, _SERVER, "timeout"),
        "closed": (503, _SERVER, "draining"),
    }
)
"""HTTP status, type and code for a failure code of the daemon or its client; all others are 500."""

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


class ApiError(Exception):
    """A failure as the HTTP client sees it. ``retry_after_s`` above 0 becomes ``Retry-After``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON object."""
        return msgspec.json.encode({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})

    def headers(self) -> dict[str, str]:
        """Besides the content type: when to try again, and how to authenticate."""
        headers = {}
        if self.retry_after_s > 0:
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def api_error(error: KvdError, *, param: str | None = None) -> ApiError:
    """The daemon's or the client's failure in the API's form. ``param`` is the field that a wrong request has wrong, where it is known."""
    status, kind, code = _OF_CODE.get(error.code, (500, _SERVER, error.code))
    message = "the gateway shuts down" if error.code == "closed" else str(error.args[0])
    retry_after_s = (error.retry_after_s or _DEFAULT_RETRY_S) if status in {429, 503} else 0.0
    return ApiError(
        status, message, kind=kind, code=code, param=param if error.code == "bad_request" else None, retry_after_s=retry_after_s
    )


def invalid_field(error: msgspec.ValidationError) -> ApiError:
    """A field of the wrong type, by name."""
    message = str(error)
    path = _PATH.search(message)
    if path is None or not path[1]:
        return ApiError(400, message)
    return ApiError(400, f"{path[1]}: {message[: path.start()]}", param=re.split(r"[.\[]", path[1])[0])


def unsupported(field: str, reason: str) -> ApiError:
    """What would change the answer and can't be done is refused, not ignored."""
    return ApiError(400, f"{field} is not supported: {reason}", code="unsupported_parameter", param=field)
