"""The failure codes of the wire. A client may rely on them; messages are for people."""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """Why a request or an operation failed (docs/protocol.md, "Failure codes")."""

    BAD_REQUEST = "bad_request"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNKNOWN_TYPE = "unknown_type"
    TOO_LARGE = "too_large"
    DUPLICATE = "duplicate"
    STARTING = "starting"
    DRAINING = "draining"
    OVERLOADED = "overloaded"
    PROMPT_TOO_LONG = "prompt_too_long"
    KV_CAPACITY = "kv_capacity"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    PIN_CAPACITY = "pin_capacity"
    ADAPTER_CAPACITY = "adapter_capacity"
    ADAPTER_UNUSABLE = "adapter_unusable"
    PIN_TOO_SHORT = "pin_too_short"
    NOT_FOUND = "not_found"
    CLIENT_TOO_SLOW = "client_too_slow"
    NONFINITE_LOGITS = "nonfinite_logits"
    ENGINE_ERROR = "engine_error"
    STORAGE_ERROR = "storage_error"
    INTERNAL = "internal"
