"""The exit codes of every command (sysexits.h), and which failure gives which."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType


class Exit(IntEnum):
    """Exit codes; docs/operations.md lists them with their meaning."""

    OK = 0
    FAILED = 1
    USAGE = 64
    DATA = 65
    NO_INPUT = 66
    UNAVAILABLE = 69
    SOFTWARE = 70
    CANNOT_CREATE = 73
    IO = 74
    TEMPORARY = 75
    PROTOCOL = 76
    NO_PERMISSION = 77
    CONFIG = 78
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


MEANINGS: Mapping[Exit, str] = MappingProxyType(
    {
        Exit.OK: "done",
        Exit.FAILED: "`kvd demo`: one of the facts does not hold",
        Exit.USAGE: "wrong command line",
        Exit.DATA: "the daemon refuses this input for good, a download has the wrong checksum, or `store check` found damage",
        Exit.NO_INPUT: "a file, a pin or a state directory that was named does not exist, nothing in that directory is kvd's, or there are no pins to export",
        Exit.UNAVAILABLE: "no daemon answers, it is still starting or already draining (`kvd ping` too), or a download source can't be reached",
        Exit.SOFTWARE: "a fault of kvd itself; `kvd serve`: the engine failed, start it again",
        Exit.CANNOT_CREATE: "a pin does not fit under `max_pinned_fraction`, or a file that would be written exists (`store export`, `store keygen`)",
        Exit.IO: "reading or writing failed, here or in the daemon (a full disk): a `forget` or `pin` that ends so promises nothing",
        Exit.TEMPORARY: "overloaded, interrupted by a restart, cut short by a drain, not over within `--timeout` or `--deadline`, or in use by another process: the same command may succeed later",
        Exit.PROTOCOL: "client and daemon speak different protocol versions",
        Exit.NO_PERMISSION: "the operating system forbids it; CURVE: the daemon refuses the client's key, or only one of the two has keys",
        Exit.CONFIG: "a wrong or missing configuration, such as a model that was not pulled",
        Exit.INTERRUPTED: "ended by Ctrl-C (128 + SIGINT); a running request was aborted. `kvd serve`: a second SIGINT cut its drain off",
        Exit.BROKEN_PIPE: "the reader of standard output went away (128 + SIGPIPE)",
        Exit.TERMINATED: "`kvd serve`: a second SIGTERM cut its drain off (128 + SIGTERM)",
    }
)

_OF_CODE: Mapping[str, Exit] = MappingProxyType(
    {
        "bad_request": Exit.DATA,
        "too_large": Exit.DATA,
        "prompt_too_long": Exit.DATA,
        "kv_capacity": Exit.DATA,
        "pin_too_short": Exit.DATA,
        "duplicate": Exit.DATA,
        "pin_capacity": Exit.CANNOT_CREATE,
        "adapter_unusable": Exit.DATA,
        "not_found": Exit.NO_INPUT,
        "starting": Exit.UNAVAILABLE,
        "draining": Exit.UNAVAILABLE,
        "unsupported_version": Exit.PROTOCOL,
        "unknown_type": Exit.PROTOCOL,
        "connection_lost": Exit.UNAVAILABLE,
        "authentication_failed": Exit.NO_PERMISSION,
        "client_too_slow": Exit.TEMPORARY,
        "deadline_exceeded": Exit.TEMPORARY,
        "storage_error": Exit.IO,
    }
)


class CommandError(Exception):
    """A command can't go on: ``message`` is for people, ``exit_code`` for scripts."""

    def __init__(self, message: str, exit_code: Exit) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_of_failure(code: str, *, retryable: bool) -> Exit:
    """The exit code for a failure that the daemon or the client library reports."""
    known = _OF_CODE.get(code)
    if known is not None:
        return known
    return Exit.TEMPORARY if retryable else Exit.SOFTWARE
