"""A client's conversation with the daemon, without a socket or a clock.

The session turns calls into frames and frames into deliveries, and knows what to do when the daemon vanishes. Whoever drives it
(``io_thread.py``, a test) hands it what happens - calls, frames, connects and disconnects, the time - and sends ``outgoing``. Not thread-safe.

Connection: ``connected`` opens a conversation with ``hello``; calls are sent once it is answered. When the connection goes away, frames that
arrived shortly before are still taken for ``SETTLE_S``. Then every stream that had begun fails as :class:`Interrupted`, and the other calls wait
for a daemon: after the next ``hello`` they are sent again, under their ids to a restarted daemon. The same daemon may still run them, and may
have sent what nobody received: there a generation is aborted and begun under a new id.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial

from kvd_client.calls import AnswerError, Call, Delivery, Reply, TokensLostError
from kvd_client.errors import (
    AuthenticationFailed,
    ClientClosed,
    ConnectionLost,
    Draining,
    InternalError,
    Interrupted,
    KvdError,
    NotFound,
    NotReady,
    Timeout,
    TooLarge,
    UnsupportedVersion,
    error_of,
)
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import (
    ID_BYTES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Abort,
    Credit,
    Failed,
    Finished,
    Hello,
    HelloReply,
    Ping,
    Pong,
    Prompt,
    Result,
    Tokens,
    Unpin,
)
from kvd_client.session_config import SessionConfig
from kvd_client.timers import Due, Timer, Timers

SETTLE_S = 0.05
"""How long after a disconnect frames of the old connection may still be on their way through the library."""
MAX_LOST = 5
"""A call that was in the hands of so many vanished daemons is not sent to another: it may be what kills them."""
MIN_RETRY_S = 0.05
MAX_RETRY_S = 2.0
"""Bounds of the wait after ``starting`` and ``draining``; the daemon's estimate may be far off."""
READY_POLL_S = 0.1
HANDSHAKE_RETRY_S = 1.0
MAX_OWED_ABORTS = 4096

_log = logging.getLogger("kvd_client")


class _Link(Enum):
    DOWN = auto()
    GREETING = auto()
    OPEN = auto()
    SETTLING = auto()
    REFUSED = auto()


class Session:
    """See the module. Times are seconds of one monotonic clock.

    Args:
        new_id: makes request and operation ids; for tests.
    """

    def __init__(self, config: SessionConfig, *, new_id: Callable[[], bytes] = lambda: os.urandom(ID_BYTES)) -> None:
        self.outgoing: deque[list[bytes]] = deque()
        """Messages to send, oldest first; the driver takes them as the socket does."""
        self.wants_fresh_socket = False
        """The peer is silent on a connection that looks alive: the driver replaces the socket and clears this."""
        self.server: HelloReply | None = None
        """The daemon's last ``hello_reply``."""
        self.num_ignored = 0
        """Messages that could not be read."""
        self._config = config
        self._new_id = new_id
        self._nonces = itertools.count(1)
        self._link = _Link.DOWN
        self._refusal: Callable[[], KvdError] = ClientClosed
        self._is_closed = False
        self._calls: dict[bytes | int, Call] = {}
        self._owed_aborts: dict[bytes, None] = {}
        self._timers = Timers(self._is_live)
        self._num_openings = 0
        self._probed_at = 0.0
        self._unanswered_since: float | None = None
        self._settled_at = 0.0
        self._trouble = ""
        self._retry_at: float | None = None

    # ------------------------------------------------------------------------------------------------ from the caller

    def open(self, call: Call, now: float) -> None:
        """Take a call. It is sent as soon as there is a daemon, and ends with exactly one last delivery."""
        if self._is_closed:
            call.deliver(ClientClosed())
            return
        if self._link is _Link.REFUSED:
            call.deliver(self._refusal())
            return
        self._give_key(call)
        if call.timeout_s != float("inf"):
            self._set_timer(now + call.timeout_s, Due.DEADLINE, call)
        if self._link is _Link.OPEN:
            self._send_call(call, now)
        else:
            self._expect_daemon(call, now)

    def grant(self, call: Call, num_tokens: int) -> None:
        """The caller has read so many tokens of a stream."""
        if self._is_live(call) and call.is_on_wire and isinstance(call.key, bytes):
            self._send(codec.encode(Credit(request_id=call.key, num_tokens=num_tokens)))

    def cancel(self, call: Call) -> None:
        """Forget a call that nobody waits for any more; nothing is delivered. A generation is aborted in the daemon."""
        if self._is_live(call):
            self._forget(call)

    def close(self) -> None:
        """End everything: aborts go to ``outgoing``, every call fails with :class:`ClientClosed`, later ones too."""
        self._is_closed = True
        self.fail_all(ClientClosed)
        self._timers.clear()

    def fail_all(self, error: Callable[[], KvdError]) -> None:
        """End every call with an error of its own."""
        for call in list(self._calls.values()):
            self._fail(call, error())

    # ------------------------------------------------------------------------------------------------ from the socket

    def connected(self, now: float) -> None:
        """The socket has a (new) connection."""
        if self._link in (_Link.GREETING, _Link.OPEN, _Link.SETTLING):
            self._lose(now)
        self._link = _Link.GREETING
        self._trouble = ""
        self._retry_at = None
        self._probe(Hello(client=self._config.client_name), now)

    def disconnected(self, now: float) -> None:
        """The connection went away; what was received before may still be handed in."""
        if self._link in (_Link.GREETING, _Link.OPEN):
            self._link = _Link.SETTLING
            self._settled_at = now + SETTLE_S
            self.outgoing.clear()

    def handshake_failed(self, now: float, reason: str, *, is_final: bool) -> None:
        """The daemon and the client's keys don't go together. Final: no call can succeed, until a fresh socket fares better."""
        self._trouble = reason
        if is_final:
            self._refuse(partial(AuthenticationFailed, reason))
            self._retry_at = now + HANDSHAKE_RETRY_S

    def receive(self, frames: Sequence[bytes], now: float) -> None:
        """Take a message from the daemon."""
        try:
            message, bodies = codec.decode_server(frames)
        except codec.ProtocolError as error:
            self.num_ignored += 1
            _log.warning("ignored a message of the daemon: %s", error)
            return
        if self._link in (_Link.DOWN, _Link.REFUSED):
            return
        self._unanswered_since = None
        if isinstance(message, HelloReply):
            self._greeted(message, now)
        elif self._link is _Link.GREETING:
            # Answers to what the socket re-delivered on its own; the calls are sent again after hello_reply.
            if isinstance(message, Failed) and not message.request_id and not message.op_id:
                self._refuse(partial(error_of, message))
        else:
            self._dispatch(message, bodies, now)

    def tick(self, now: float) -> None:
        """Do what is due. Call it after everything that had arrived was handed in."""
        if self._link is _Link.SETTLING and now >= self._settled_at:
            self._lose(now)
        self._heartbeat(now)
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._link = _Link.DOWN
            self.wants_fresh_socket = True
        for timer in self._timers.take_due(now):
            call = timer.call
            match timer.due:
                case Due.DEADLINE:
                    self._fail(call, Timeout(self._timeout_message(call)))
                case Due.RESEND if call.resend_at == timer.at and self._link is _Link.OPEN:
                    self._send_call(call, now)
                case Due.UNREACHABLE if timer.opening == self._num_openings and self._link is not _Link.OPEN:
                    self._fail(call, ConnectionLost(self._no_daemon()))
                case _:
                    pass

    def next_tick_at(self) -> float | None:
        """When ``tick`` has to be called at the latest; None while nothing is due."""
        due = [at for at in (self._timers.next_at(), self._retry_at) if at is not None]
        if self._link is _Link.SETTLING:
            due.append(self._settled_at)
        if self._link is _Link.OPEN:
            due.append(self._probed_at + self._config.heartbeat_interval_s)
        if self._link in (_Link.GREETING, _Link.OPEN) and self._unanswered_since is not None:
            due.append(self._unanswered_since + self._config.heartbeat_timeout_s)
        return min(due, default=None)

    # --------------------------------------------------------------------------------------------------- connection

    def _greeted(self, message: HelloReply, now: float) -> None:
        low, high = message.protocol
        if low > PROTOCOL_MAX or high < PROTOCOL_MIN:
            text = f"the daemon speaks protocol {low} to {high}, this client {PROTOCOL_MIN} to {PROTOCOL_MAX}"
            self._refuse(partial(UnsupportedVersion, text, code=Code.UNSUPPORTED_VERSION))
            return
        is_restart = self.server is None or self.server.instance != message.instance
        self.server = message
        if self._link is _Link.GREETING:
            _log.debug("connected to instance %s, %s", message.instance.hex(), message.state)
            self._link = _Link.OPEN
            self._num_openings += 1
            if not is_restart:
                for request_id in self._owed_aborts:
                    self._send(codec.encode(Abort(request_id=request_id)))
            self._owed_aborts.clear()
            for call in list(self._calls.values()):
                if is_restart:
                    call.num_sends = 0
                elif call.answer is not None and call.is_in_doubt:
                    self._rename(call)
                call.is_in_doubt = False
                self._send_call(call, now)
        for call in [call for call in self._calls.values() if isinstance(call.message, Hello) and call.is_on_wire]:
            self._deliver(call, Reply({}, message=message, round_trip_s=now - call.sent_at))

    def _lose(self, now: float) -> None:
        """The connection is over: fail what can't go on, keep the rest for the next daemon."""
        _log.debug("lost the connection with %d open calls", len(self._calls))
        self._link = _Link.DOWN
        self._unanswered_since = None
        self.outgoing.clear()
        for call in list(self._calls.values()):
            if call.has_delivered:
                self._fail(call, Interrupted("the daemon vanished in the middle of the stream"))
            elif call.is_on_wire and not call.resend:
                self._fail(call, ConnectionLost("the daemon vanished before it answered; whether it acted is not known"))
            else:
                self._keep(call, now)

    def _keep(self, call: Call, now: float) -> None:
        if call.is_on_wire:
            call.num_lost += 1
            call.is_in_doubt = True
            call.is_on_wire = False
        if call.answer is not None:
            call.answer.forget()
        if call.num_lost >= MAX_LOST and not call.patient:
            self._fail(call, Interrupted(f"the daemon vanished {call.num_lost} times while it held this call"))
        else:
            self._expect_daemon(call, now)

    def _refuse(self, error: Callable[[], KvdError]) -> None:
        """The daemon won't have this client: fail everything until the socket connects anew."""
        self.outgoing.clear()
        self.fail_all(error)
        self._link = _Link.REFUSED
        self._refusal = error
        self._unanswered_since = None

    def _heartbeat(self, now: float) -> None:
        if self._link not in (_Link.GREETING, _Link.OPEN):
            return
        if self._unanswered_since is not None and now - self._unanswered_since >= self._config.heartbeat_timeout_s:
            _log.warning("the daemon has been silent for %.0f s: connecting anew", now - self._unanswered_since)
            self._lose(now)
            self.wants_fresh_socket = True
        elif self._link is _Link.OPEN and now - self._probed_at >= self._config.heartbeat_interval_s:
            self._probe(Ping(), now)

    def _probe(self, message: Hello | Ping, now: float) -> None:
        self._send(codec.encode(message))
        self._probed_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now

    def _expect_daemon(self, call: Call, now: float) -> None:
        """Bound the time that a call waits for a connection."""
        if not call.patient:
            patience_s = self._config.connect_timeout_s if self.server is None else self._config.reconnect_timeout_s
            self._set_timer(now + patience_s, Due.UNREACHABLE, call)

    # ------------------------------------------------------------------------------------------------------ messages

    def _dispatch(self, message: Prompt | Tokens | Finished | Failed | Result | Pong, bodies: list[bytes], now: float) -> None:
        match message:
            case Prompt() | Tokens() | Finished():
                self._answered(message, bodies, now)
            case Result():
                call = self._calls.get(message.op_id)
                if call is not None and call.answer is None:
                    self._result(call, bodies, now)
            case Failed():
                call = self._calls.get(message.request_id or message.op_id)
                if call is not None:
                    self._failed(call, error_of(message), now)
                elif not message.request_id and not message.op_id:
                    self.num_ignored += 1
                    _log.warning("the daemon could not read a message: %s: %s", message.code, message.message)
            case Pong():
                self._ponged(message, now)

    def _answered(self, message: Prompt | Tokens | Finished, bodies: list[bytes], now: float) -> None:
        call = self._calls.get(message.request_id)
        if call is None or call.answer is None:
            return  # aborted, or renamed: nobody waits for it
        try:
            if isinstance(message, Prompt):
                call.answer.take_prompt(message, bodies)
            elif isinstance(message, Tokens):
                chunk = call.answer.take_tokens(message, bodies)
                if chunk is not None:
                    call.deliver(chunk)
            else:
                completion = call.answer.complete(message)
                for chunk in call.answer.last_chunks(message):
                    call.deliver(chunk)
                self._deliver(call, completion)
        except TokensLostError:
            self._ask_anew(call, now)
        except AnswerError as error:
            self._fail(call, InternalError(str(error), code=Code.INTERNAL))

    def _result(self, call: Call, bodies: list[bytes], now: float) -> None:
        try:
            data = codec.unpack_body(bodies[0]) if bodies else {}
        except codec.ProtocolError as error:
            self._fail(call, InternalError(f"bad result: {error}", code=Code.INTERNAL))
            return
        if isinstance(data, dict):
            self._deliver(call, Reply(data, tuple(bodies[1:]), round_trip_s=now - call.sent_at))
        else:
            self._fail(call, InternalError("bad result: not a map", code=Code.INTERNAL))

    def _failed(self, call: Call, error: KvdError, now: float) -> None:
        if error.code == Code.DUPLICATE and call.answer is not None:
            # Sent once, the socket has delivered it twice, and its answer is on its way. Sent again after a refusal, it was not forgotten as
            # it should have been.
            if call.num_sends > 1:
                self._ask_anew(call, now)
        elif isinstance(error, NotReady | Draining) and call.resend and not call.has_delivered and self._config.wait_until_ready:
            if call.answer is not None:
                call.answer.forget()
            call.is_on_wire = False
            call.last_refusal = error
            self._resend_at(call, now + min(max(error.retry_after_s, MIN_RETRY_S), MAX_RETRY_S))
        elif isinstance(error, NotFound) and isinstance(call.message, Unpin) and call.num_lost:
            self._deliver(call, Reply({}))  # an earlier sending had been heard
        else:
            call.is_on_wire = False
            self._fail(call, error)

    def _ponged(self, message: Pong, now: float) -> None:
        if self.server is not None and message.instance and message.instance != self.server.instance:
            self.connected(now)  # the connection changed hands without a word
            return
        call = self._calls.get(message.nonce)
        if call is None:
            return
        if call.until_ready and message.state != "ready":
            call.is_on_wire = False
            call.last_refusal = NotReady(f"the daemon is {message.state}", code=Code.STARTING, retryable=True)
            self._resend_at(call, now + READY_POLL_S)
        else:
            self._deliver(call, Reply({}, message=message, round_trip_s=now - call.sent_at))

    # --------------------------------------------------------------------------------------------------------- calls

    def _give_key(self, call: Call) -> None:
        is_probe = isinstance(call.message, Ping | Hello)
        call.key = next(self._nonces) if is_probe else self._new_id()
        call.num_sends = 0
        self._calls[call.key] = call

    def _send_call(self, call: Call, now: float) -> None:
        assert self.server is not None
        limit = self.server.limits.max_message_bytes
        longest = max(map(len, call.bodies), default=0)
        if longest > limit:
            self._fail(call, TooLarge(f"body of {longest} bytes, the daemon takes {limit}", code=Code.TOO_LARGE))
            return
        self._send(call.frames())
        call.is_on_wire = True
        call.num_sends += 1
        call.resend_at = None
        call.sent_at = now

    def _ask_anew(self, call: Call, now: float) -> None:
        """A part of the answer is lost for good: begin again under a new id, or give up if the caller has seen the beginning."""
        assert call.answer is not None
        if call.has_delivered:
            self._fail(call, Interrupted("a part of the stream was lost"))
            return
        call.num_lost += 1
        if call.num_lost >= MAX_LOST:
            self._fail(call, Interrupted(f"the answer was lost {call.num_lost} times"))
            return
        self._rename(call)
        call.answer.forget()
        if self._link is _Link.OPEN:  # else with all others after the next hello
            self._send_call(call, now)

    def _rename(self, call: Call) -> None:
        """Give up a generation's id, in the daemon too, for a new one."""
        assert isinstance(call.key, bytes)
        del self._calls[call.key]
        self._abort(call.key)
        call.is_on_wire = False
        self._give_key(call)

    def _resend_at(self, call: Call, at: float) -> None:
        call.resend_at = at
        self._set_timer(at, Due.RESEND, call)

    def _deliver(self, call: Call, last: Delivery) -> None:
        del self._calls[call.key]
        call.deliver(last)

    def _fail(self, call: Call, error: KvdError) -> None:
        self._forget(call)
        call.deliver(error)

    def _forget(self, call: Call) -> None:
        """Drop a call, and see to it that the daemon does not go on with it."""
        del self._calls[call.key]
        if call.answer is not None and (call.is_on_wire or call.is_in_doubt):
            assert isinstance(call.key, bytes)
            self._abort(call.key)
        call.is_on_wire = False

    def _abort(self, request_id: bytes) -> None:
        """Now, or when the same daemon is back."""
        if self._link is _Link.OPEN:
            self._send(codec.encode(Abort(request_id=request_id)))
        elif len(self._owed_aborts) < MAX_OWED_ABORTS:
            self._owed_aborts[request_id] = None

    def _is_live(self, call: Call) -> bool:
        return self._calls.get(call.key) is call

    def _no_daemon(self) -> str:
        where = f" at {self._config.endpoint}" if self._config.endpoint else ""
        return f"no daemon answers{where}" + (f": {self._trouble}" if self._trouble else "")

    def _timeout_message(self, call: Call) -> str:
        text = f"not over within {call.timeout_s:g} s"
        if self._link is not _Link.OPEN:
            return f"{text}: {self._no_daemon()}"
        if call.last_refusal is not None and not call.is_on_wire:
            return f"{text}: {call.last_refusal.args[0]}"
        return text

    def _set_timer(self, at: float, due: Due, call: Call) -> None:
        self._timers.set(Timer(at, due, call, self._num_openings))

    def _send(self, frames: list[bytes]) -> None:
        self.outgoing.append(frames)
