"""Log set-up: one structlog pipeline with three ends, and Python's own logging bridged into it.

Under systemd records go to journald's native protocol, on a terminal to a console renderer, elsewhere as JSON lines to standard error.
Context variables (``structlog.contextvars.bind_contextvars(request_id=…)``) are part of each record. Prompts and tokens are never
written unless ``log_prompts`` asks for it, whatever a caller passes. structlog is imported where it is used: ``kvd --help`` pays nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from structlog.typing import Processor

    from kvd.observe.journal import JournalSocket

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PRIVATE_KEYS = frozenset({"prompt", "prompts", "text", "messages", "output", "token_ids", "tokens"})
"""Keys that hold what users wrote or the model answered. A number under such a key is a count, and passes."""


def get_logger(room: str) -> Any:
    """A structlog logger whose records carry ``room``. Before ``configure`` it writes warnings to standard error."""
    import structlog

    if not structlog.is_configured():
        _configure_structlog("warning", "auto", log_prompts=False, environ=os.environ, stream=None)
    return structlog.get_logger(room=room)


def configure(
    *,
    level: str = "info",
    log_format: str = "auto",
    log_prompts: bool = False,
    environ: Mapping[str, str] = os.environ,
    stream: TextIO | None = None,
) -> None:
    """Send every record of this process where the arguments say. May be called again; the last call holds.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        log_format: ``auto``, ``json``, ``console`` or ``journald``.
        log_prompts: whether prompts and outputs may be written.
        environ: where ``JOURNAL_STREAM`` and ``NO_COLOR`` are looked up.
        stream: for console and JSON; standard error by default.
    """
    _configure_structlog(level, log_format, log_prompts=log_prompts, environ=environ, stream=stream)
    root = logging.getLogger()
    root.handlers[:] = [handler for handler in root.handlers if not isinstance(handler, _Bridge)] + [_Bridge()]
    root.setLevel(max(_LEVELS[level], logging.INFO))  # other people's debug records are theirs alone


def configure_embedded(level: str) -> None:
    """Send kvd's own records of at least this level to standard error. Python's logging stays as it is, and so does a structlog that was set up before."""
    import structlog

    if not structlog.is_configured():
        _configure_structlog(level, "console", log_prompts=False, environ=os.environ, stream=None)


def _configure_structlog(level: str, log_format: str, *, log_prompts: bool, environ: Mapping[str, str], stream: TextIO | None) -> None:
    import structlog

    if log_format == "auto":
        log_format = _automatic_format(environ, stream)
    last, factory = _end_of(log_format, environ, stream)
    private: list[Processor] = [] if log_prompts else [_redact]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _room_of_logger,
            *private,
            _hex_bytes,
            structlog.processors.StackInfoRenderer(),
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=factory,
        cache_logger_on_first_use=False,
    )


class LineSink:
    """The end of a structlog chain: whatever the level, the rendered record goes to one function. ``room`` is the logger's name, if it has one."""

    def __init__(self, write: Callable[[Any], object], room: str = "") -> None:
        self.room = room
        self.debug = self.info = self.warning = self.error = self.critical = self.exception = self.msg = write


class _Bridge(logging.Handler):
    """Hands the records of Python's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        import structlog

        try:
            level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
            structlog.get_logger(room=record.name).log(level, record.getMessage(), exc_info=record.exc_info)
        except Exception:
            self.handleError(record)


def _automatic_format(environ: Mapping[str, str], stream: TextIO | None) -> str:
    stream = stream or sys.stderr
    if is_journal_stream(environ.get("JOURNAL_STREAM", ""), stream):
        return "journald"
    return "console" if stream.isatty() else "json"


def is_journal_stream(journal_stream: str, stream: TextIO) -> bool:
    """Whether ``stream`` is the one that systemd connected to the journal: ``JOURNAL_STREAM`` is its ``device:inode``."""
    try:
        stat = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return journal_stream == f"{stat.st_dev}:{stat.st_ino}"


def _end_of(log_format: str, environ: Mapping[str, str], stream: TextIO | None) -> tuple[list[Processor], Callable[..., LineSink]]:
    """The processors that render a record in ``log_format``, and the factory of the sink that takes it."""
    import structlog

    if log_format == "journald":
        from kvd.observe.journal import JournalSocket

        journal = JournalSocket()
        return [structlog.processors.format_exc_info, _Journal(journal)], lambda *name: LineSink(journal.send, *name)

    is_terminal = log_format == "console" and (stream or sys.stderr).isatty()
    start = "\r\x1b[K" if is_terminal else ""  # over a progress bar that is being drawn

    def write(line: str) -> None:
        end = stream or sys.stderr  # looked up at each record: standard error may be replaced
        with contextlib.suppress(OSError, ValueError):  # a closed standard error stops no daemon
            end.write(f"{start}{line}\n")
            end.flush()

    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    if log_format == "console":
        console = structlog.dev.ConsoleRenderer(
            colors=is_terminal and not environ.get("NO_COLOR"), exception_formatter=structlog.dev.plain_traceback
        )
        return [structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False), console], lambda *name: LineSink(write, *name)
    return [stamp, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()], lambda *name: LineSink(write, *name)


def _room_of_logger(logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """``structlog.get_logger("storage")`` means the same as ``get_logger("storage")`` of this module."""
    if getattr(logger, "room", ""):
        event.setdefault("room", logger.room)
    return event


def _redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name in _PRIVATE_KEYS & event.keys():
        if not isinstance(event[name], int | float):
            event[name] = f"<{len(event[name])} not logged>" if hasattr(event[name], "__len__") else "<not logged>"
    return event


def _hex_bytes(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if isinstance(value, bytes):
            event[name] = value.hex()
    return event


class _Journal:
    """A record as a datagram of journald's native protocol."""

    def __init__(self, journal: JournalSocket) -> None:
        self._journal = journal

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> bytes:
        return self._journal.render(event)
