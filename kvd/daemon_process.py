"""The daemon as a process of its own: signals, limits of the system, the collector, and how the process ends."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from types import FrameType, MappingProxyType
from typing import NoReturn

import structlog

from kvd.config import ConfigError, DaemonConfig
from kvd.daemon import EXIT_SOFTWARE, Daemon
from kvd.observe.notify import Notifier
from kvd.start_errors import TEMPORARY, as_config_error
from kvd.storage.errors import DiskFaultError, StateLockedError
from kvd.transport.errors import EndpointInUseError

EXIT_IO = 74
EXIT_TEMPORARY = 75
EXIT_CONFIG = 78

_MAX_DESCRIPTORS = 65536

_TEMPORARY_ENDS: Mapping[type[Exception], tuple[str, int]] = MappingProxyType(
    {
        StateLockedError: ("state_locked", EXIT_TEMPORARY),
        EndpointInUseError: ("endpoint_in_use", EXIT_TEMPORARY),
        DiskFaultError: ("disk_fault", EXIT_IO),
    }
)
"""Refusals that another start may be spared with the same configuration: what is logged, and the exit code."""


def run(config: DaemonConfig) -> int:
    """Run the daemon on this thread until it ends; the exit code for the process (docs/operations.md, "Exit codes").

    Raises:
        ConfigError: it must not start like this; the message says what to change.
    """
    _raise_descriptor_limit()
    daemon = ProcessDaemon(config, notifier=Notifier.from_environment())
    try:
        code = _run(daemon)
    except BaseException as error:
        if daemon.is_loading:
            if isinstance(error, ConfigError):
                sys.stderr.write(f"kvd: {error}\n")
                _leave(EXIT_CONFIG)
            traceback.print_exc()
            _leave(EXIT_SOFTWARE)
        raise
    if daemon.is_loading:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """A thread inside torch would abort the interpreter's own way out."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _raise_descriptor_limit() -> None:
    """As many file descriptors as the system allows, up to what the systemd unit has: without one for a new ipc connection libzmq aborts the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _run(daemon: Daemon) -> int:
    try:
        return daemon.run()
    except TEMPORARY as error:
        event, code = _TEMPORARY_ENDS[type(error)]
        structlog.get_logger("daemon").error(event, error=str(error))
        return code
    except Exception as error:
        wrong = as_config_error(error)
        if wrong is None or wrong is error:
            raise
        raise wrong from error


class ProcessDaemon(Daemon):
    """The one daemon of this process, on its main thread."""

    def run(self) -> int:
        os.umask(0o077)
        faulthandler.enable()  # the watchdog's SIGABRT then says what each thread was doing
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        return super().run()

    def _before_loop(self) -> None:
        """What lives until the end is not looked at by the collector: its pauses then depend on the requests alone. It was off during the start, where
        nearly everything stays.
        """
        gc.freeze()
        gc.enable()

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Notes it, no more: what it interrupts may hold a lock, or be a callback of C++, which ends the process over an exception."""
        if self._num_stops:
            os._exit(128 + signum)
        self.request_stop()
