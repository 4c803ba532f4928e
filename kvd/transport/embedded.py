"""The edge of a daemon that lives in its client's process: both sides of the protocol on one thread, without a socket between them.

It is a client's way to the daemon (``kvd_client.calls.Io``) and the daemon's frontend at once. The frames are those of the wire: what the protocol promises,
limits and refusals included, holds here too.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvd_client.calls import Call
from kvd_client.errors import ClientClosed, InternalError
from kvd_client.protocol.codes import Code
from kvd_client.session import Session as ClientSession
from kvd_client.session_config import SessionConfig

from kvd.config import TransportConfig
from kvd.observe.logging import get_logger
from kvd.text.errors import TextError
from kvd.transport.bodies import TextResult
from kvd.transport.inproc import InprocInbox, InprocOutbox
from kvd.transport.ports import Text
from kvd.transport.session import Session
from kvd.transport.tenants import Caller
from kvd.transport.text_threads import TextThreads

NAME = "this process"
"""Where the daemon is, for messages."""

_PEER = b"in-process"
_OWNER = Caller(is_operator=True)
_TICK_S = 0.25


def _nobody(_message: str) -> None:
    """Nobody is told."""


_Command = Callable[[ClientSession, float], None]


class EmbeddedEdge:
    """One client and one daemon. The client's side may be used from the beginning: calls wait for the daemon. ``attach`` is the daemon's."""

    endpoints: tuple[str, ...] = ()

    def __init__(self) -> None:
        config = SessionConfig(connect_timeout_s=math.inf, reconnect_timeout_s=math.inf, heartbeat_timeout_s=math.inf, endpoint=NAME)
        self._client = ClientSession(config)
        self._daemon: Session | None = None
        self._text_threads: TextThreads | None = None
        self._outbox: InprocOutbox | None = None
        self._on_failure: Callable[[str], None] = _nobody
        self._log = get_logger("transport")
        self._lock = threading.RLock()  # a stream's destructor may submit in the middle of submit
        self._commands: deque[_Command] = deque()
        self._from_text: deque[Text | TextResult] = deque()
        self._woken = threading.Event()
        self._is_stopping = False
        self._is_over = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvd-edge", daemon=True)

    # -------------------------------------------------------------------------------- the client's side: any thread

    def open(self, call: Call) -> None:
        """Begin a call.

        Raises:
            ClientClosed: in a process forked since: the daemon stayed with the parent.
        """
        if os.getpid() != self._pid:
            raise ClientClosed("this engine belongs to the process that made it")
        self._submit(lambda session, now: session.open(call, now))

    def cancel(self, call: Call) -> None:
        """Forget a call, and abort it in the daemon. Destructors may call it."""
        if os.getpid() == self._pid:
            self._submit(lambda session, _: session.cancel(call))

    def grant(self, call: Call, num_tokens: int) -> None:
        """The reader of a stream has taken so many tokens."""
        if os.getpid() == self._pid:
            self._submit(lambda session, _: session.grant(call, num_tokens))

    def close(self) -> None:
        """End every call, and abort in the daemon what runs. The daemon goes on until it is told to stop."""
        if os.getpid() == self._pid:
            self._submit(lambda session, _: session.close())

    def _submit(self, command: _Command) -> None:
        with self._lock:
            if self._is_over:
                command(self._client, time.monotonic())
                return
            self._commands.append(command)
        self._woken.set()

    def end(self) -> None:
        """There is no daemon, or none any more: every call ends. Any thread; nothing if that is so already."""
        with self._lock:
            self._client.close()
            while self._commands:
                self._commands.popleft()(self._client, time.monotonic())
            self._is_over = True  # later commands run at once, on whichever thread: no call is left

    # -------------------------------------------------------------------------------- the daemon's side

    def attach(
        self,
        config: TransportConfig,
        *,
        inbox: InprocInbox,
        outbox: InprocOutbox,
        instance: bytes,
        on_failure: Callable[[str], None],
        drain_timeout_s: float,
        load_text: Callable[[], Text],
        **_: object,
    ) -> EmbeddedEdge:
        """Begin to serve, as ``kvd.frontend.start_frontend`` does over sockets; once."""
        self._daemon = Session(
            config, put=inbox.put, instance=instance, version=importlib.metadata.version("kvd"), drain_timeout_s=drain_timeout_s
        )
        self._outbox = outbox
        self._on_failure = on_failure
        self._text_threads = TextThreads(
            config.text_threads,
            load=load_text,
            date=config.template_date,
            on_loaded=self._take_text,
            on_failed=self._text_failed,
            on_result=self._take_text,
        )
        outbox.on_put(self._woken.set)
        self._text_threads.start()
        self._thread.start()
        return self

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """End, after the last words of the daemon if ``Stopped`` was put into the outbox; whether it ended in time."""
        self._is_stopping = True
        self._woken.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        daemon, outbox, text_threads = self._daemon, self._outbox, self._text_threads
        assert daemon is not None, "it was attached"
        assert outbox is not None, "it was attached"
        assert text_threads is not None, "it was attached"
        try:
            self._client.connected(time.monotonic())
            while not (daemon.is_stopped or self._is_stopping):
                self._turn(daemon, outbox, text_threads)
                self._woken.wait(self._sleep_s())
                self._woken.clear()
            self._turn(daemon, outbox, text_threads)  # what ended the loop may have come after the last turn
        except Exception as error:
            self._log.critical("transport_failed", error=repr(error), exc_info=error)
            message = f"the edge failed: {error!r}"
            self._client.fail_all(lambda: InternalError(message, code=Code.INTERNAL))
            self._on_failure(message)
        finally:
            outbox.on_put(None)
            text_threads.stop()
            self._daemon = self._outbox = self._text_threads = None
            self._on_failure = _nobody  # the daemon's: whoever still has this edge does not keep it
            self.end()

    def _turn(self, daemon: Session, outbox: InprocOutbox, text_threads: TextThreads) -> None:
        now = time.monotonic()
        with self._lock:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command(self._client, now)
        self._client.tick(now)
        self._client.wants_fresh_socket = False
        daemon.on_events(outbox.drain(), now)
        while self._from_text:
            arrived = self._from_text.popleft()
            if isinstance(arrived, TextResult):
                daemon.on_text(arrived, now)
            else:
                daemon.set_text(arrived)
        daemon.tick(now)
        self._exchange(daemon, text_threads, now)

    def _exchange(self, daemon: Session, text_threads: TextThreads, now: float) -> None:
        """Frames both ways until neither side has any."""
        while True:
            outgoing = daemon.take_outgoing()
            if not outgoing and not self._client.outgoing:
                break
            for out in outgoing:
                self._client.receive(out.frames, now)
                daemon.on_sent(out)
            while self._client.outgoing:
                daemon.receive(_PEER, self._client.outgoing.popleft(), now, _OWNER)
        for job in daemon.take_text_jobs():
            text_threads.submit(job)

    def _sleep_s(self) -> float:
        due = self._client.next_tick_at()
        return _TICK_S if due is None else min(_TICK_S, max(0.0, due - time.monotonic()))

    # -------------------------------------------------------------------------------- from the text threads

    def _take_text(self, arrived: Text | TextResult) -> None:
        self._from_text.append(arrived)
        self._woken.set()

    def _text_failed(self, error: BaseException) -> None:
        is_mistake = isinstance(error, TextError | OSError)  # no such model: of no use are the lines of code that found it out
        self._log.error("text_failed", error=repr(error), exc_info=None if is_mistake else error)
        self._on_failure(f"the tokenizer can't be loaded, or a text thread failed: {error!r}")
