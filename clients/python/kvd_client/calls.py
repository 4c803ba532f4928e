"""One call each: what was asked of the daemon, and how far its answer has come.

A call is made by the client, then belongs to the session (``session.py``), which alone changes it. What comes of it is handed to
``deliver``: any number of :class:`Chunk` (streams only), then exactly one last delivery.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvd_client.errors import KvdError
from kvd_client.protocol import codec
from kvd_client.protocol.messages import (
    Checkpoint,
    Detokenize,
    Drain,
    Finished,
    Forget,
    Generate,
    Hello,
    HelloReply,
    ListAdapters,
    LoadAdapter,
    Pin,
    Ping,
    Pong,
    Prefixes,
    Prompt,
    Stats,
    Status,
    Tokenize,
    TokenLogprob,
    Tokens,
    UnloadAdapter,
    Unpin,
)
from kvd_client.results import Choice, Chunk, Completion, PromptEcho, Usage, unpack_tokens

OperationMessage = (
    Pin
    | Unpin
    | Forget
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | Prefixes
    | Tokenize
    | Detokenize
    | Status
    | Stats
    | Checkpoint
    | Drain
    | Ping
    | Hello
)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to an operation: the map of a ``result`` with the bodies after it, a ``pong`` or a ``hello_reply``."""

    data: dict[str, Any]
    bodies: Sequence[bytes] = ()
    message: Pong | HelloReply | None = None
    round_trip_s: float = 0.0


Delivery = Chunk | Completion | Reply | KvdError
Deliver = Callable[[Delivery], None]


class TokensLostError(Exception):
    """The daemon sent tokens that did not arrive: the stream has a hole."""


class AnswerError(Exception):
    """The daemon's message about this request can't be right."""


class Call:
    """One message to the daemon and what it is answered with: a generation where it has an ``answer``, else an operation.

    Args:
        message: without its id, which the session gives.
        bodies: the frames after the header.
        deliver: takes what comes of the call; must neither block nor raise.
        timeout_s: from the moment the session takes the call; ``math.inf`` for no limit.
        answer: collects the tokens of a generation.
        resend: whether it may be sent again after a daemon vanished that may have received it.
        patient: whether it waits for a daemon longer than the session's connect and reconnect timeouts.
        until_ready: a ping that repeats itself until the daemon says ``ready``.
    """

    def __init__(
        self,
        message: Generate | OperationMessage,
        *bodies: bytes,
        deliver: Deliver,
        timeout_s: float = math.inf,
        answer: Answer | None = None,
        resend: bool = True,
        patient: bool = False,
        until_ready: bool = False,
    ) -> None:
        self.message = message
        self.bodies = bodies
        self.timeout_s = timeout_s
        self.deliver = deliver
        self.answer = answer
        self.resend = resend
        self.patient = patient
        self.until_ready = until_ready
        self.key: bytes | int = b""
        """Its id on the wire: request id, operation id, or the nonce of a ping or hello."""
        self.is_on_wire = False
        """Sent on this connection, and neither answered nor refused since."""
        self.is_in_doubt = False
        """It was on the wire when the connection went away: the daemon may run it."""
        self.num_sends = 0
        """How often it was sent under this id to this instance of the daemon."""
        self.num_lost = 0
        """How many connections went away while it was on the wire."""
        self.resend_at: float | None = None
        self.sent_at = 0.0
        self.last_refusal: KvdError | None = None

    @property
    def has_delivered(self) -> bool:
        """Whether the caller has been given a part of the answer."""
        return self.answer is not None and self.answer.num_delivered > 0

    def frames(self) -> list[bytes]:
        """The message under the present id.

        Raises:
            ProtocolError: its header is too long.
        """
        return codec.encode(with_id(self.message, self.key), *self.bodies)


def with_id(message: Generate | OperationMessage, key: bytes | int) -> Generate | OperationMessage:
    """The message with its request id, operation id or nonce."""
    match message:
        case Hello():
            return message
        case Ping():
            return msgspec.structs.replace(message, nonce=key)
        case Generate():
            return msgspec.structs.replace(message, request_id=key)
        case _:
            return msgspec.structs.replace(message, op_id=key)


class _ChoiceState:
    __slots__ = ("logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.token_ids: array[int] = array("I")
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []


class Answer:
    """What has come of a generation, by choice.

    Args:
        num_choices: the request's ``n``.
        prompt_logprobs: whether log-probabilities of the prompt were asked for: all of them must come.
        stream: whether each message of tokens is delivered as it comes; else only the whole completion is, and until then the request can be
            asked anew without anybody noticing.
    """

    def __init__(self, num_choices: int, *, stream: bool, prompt_logprobs: bool = False) -> None:
        self.stream = stream
        self.num_delivered = 0
        self._num_choices = num_choices
        self._wants_prompt_logprobs = prompt_logprobs
        self._choices: defaultdict[int, _ChoiceState] = defaultdict(_ChoiceState)
        """Of those that tokens have come of: before the daemon has refused it, ``n`` may be any number."""
        self._prompt: tuple[tuple[int, ...], str] | None = None
        """Its tokens and text as far as these were asked for; None until something of the prompt has come."""
        self._prompt_logprobs: list[TokenLogprob] = []

    @property
    def prompt(self) -> PromptEcho | None:
        """What has come of the prompt: all that was asked for, once there are tokens."""
        return None if self._prompt is None else PromptEcho(*self._prompt, tuple(self._prompt_logprobs))

    def forget(self) -> None:
        """Be as if nothing had come yet."""
        assert not self.num_delivered
        self._choices.clear()
        self._prompt = None
        self._prompt_logprobs.clear()

    def take_prompt(self, message: Prompt, bodies: Sequence[bytes]) -> None:
        """Take what is told of the prompt.

        Raises:
            TokensLostError: a part before this one is missing.
            AnswerError: the message contradicts itself.
        """
        num_known = len(self._prompt_logprobs) + 1
        if message.first_position > num_known:
            raise TokensLostError
        if message.first_position < num_known:
            return  # delivered twice
        try:
            if bodies:
                self._prompt = tuple(unpack_tokens(bodies[0])), bodies[1].decode() if len(bodies) > 1 else ""
        except ValueError as error:
            raise AnswerError(f"bad body of a prompt message: {error}") from error
        if self._prompt is None:
            self._prompt = (), ""
        self._prompt_logprobs.extend(message.logprobs)

    def take_tokens(self, message: Tokens, bodies: Sequence[bytes]) -> Chunk | None:
        """Append tokens; what a stream delivers of them.

        Raises:
            TokensLostError: tokens before these are missing.
            AnswerError: the message contradicts the request or itself.
        """
        if not 0 <= message.choice < self._num_choices:
            raise AnswerError(f"tokens of choice {message.choice}, the request has {self._num_choices}")
        try:
            token_ids = unpack_tokens(bodies[0])
            text = bodies[1].decode() if len(bodies) > 1 else ""
        except (IndexError, ValueError) as error:
            raise AnswerError(f"bad body of a tokens message: {error}") from error
        state = self._choices[message.choice]
        num_known = len(state.token_ids)
        if message.first_index < num_known:
            return None  # delivered twice
        if message.first_index > num_known:
            raise TokensLostError
        state.token_ids.extend(token_ids)
        state.texts.append(text)
        state.logprobs.extend(message.logprobs)
        if not self.stream:
            return None
        self.num_delivered += 1
        return Chunk(message.choice, num_known, tuple(token_ids), text, message.logprobs)

    def last_chunks(self, message: Finished) -> list[Chunk]:
        """What a stream delivers before its completion: for each choice the rest of its text and why it ended."""
        if not self.stream:
            return []
        return [
            Chunk(end.choice, len(self._choices[end.choice].token_ids), (), end.text_tail, (), end.finish_reason) for end in message.choices
        ]

    def complete(self, message: Finished) -> Completion:
        """The whole answer.

        Raises:
            TokensLostError: fewer tokens came than the daemon counts.
            AnswerError: a choice is missing or unknown.
        """
        ends = sorted(message.choices, key=lambda end: end.choice)
        if len(ends) != self._num_choices or any(end.choice != number for number, end in enumerate(ends)):
            raise AnswerError(f"finished with choices {[end.choice for end in ends]} of {self._num_choices}")
        if self._wants_prompt_logprobs and message.usage.completion_tokens and len(self._prompt_logprobs) < message.usage.prompt_tokens - 1:
            raise TokensLostError
        choices = []
        for end in ends:
            state = self._choices[end.choice]
            if len(state.token_ids) < end.num_tokens:
                raise TokensLostError
            token_ids, logprobs = tuple(state.token_ids[: end.num_tokens]), tuple(state.logprobs[: end.num_tokens])
            text = "".join(state.texts) + end.text_tail
            total, score = (None if isinstance(value, msgspec.UnsetType) else value for value in (end.cumulative_logprob, end.score))
            choices.append(Choice(end.choice, text, token_ids, end.finish_reason, logprobs, total, score))
        return Completion(message.request_id, tuple(choices), Usage.of(message.usage), message.timings, message.seed, self.prompt)


class Io(Protocol):
    """A way to a daemon. Any thread calls it."""

    def open(self, call: Call) -> None:
        """Begin a call; raises ``ClientClosed`` in a process forked since."""

    def cancel(self, call: Call) -> None:
        """Forget a call, and abort it in the daemon."""

    def grant(self, call: Call, num_tokens: int) -> None:
        """The reader of a stream has taken so many tokens."""

    def close(self) -> None:
        """End every call with ``ClientClosed``. More than once is no mistake."""


class CreditWindow:
    """The reader's side of stream credit: says when read tokens are worth a ``credit`` message.

    At most ``num_tokens`` are unread at any time; half of a window is given back at once, so that the daemon never waits for a reader that
    keeps up.
    """

    def __init__(self, num_tokens: int) -> None:
        self._threshold = max(1, num_tokens // 2)
        self._unreturned = 0

    def read(self, num_tokens: int) -> int:
        """Count tokens as read; the credit to grant now, mostly 0."""
        self._unreturned += num_tokens
        if self._unreturned < self._threshold:
            return 0
        granted, self._unreturned = self._unreturned, 0
        return granted
