"""Generation requests at the edge: from ``generate`` to the one terminal message.

A request is *tokenising* until its prompt comes back from a text thread, then *running* until the engine's last word on it
(``RequestDone`` or ``RequestFailed``). While the engine holds a request its entry stays here, *muted* if the client is gone or already has
its terminal message, so that an id never names two requests in the engine at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvd_client.protocol.messages import ChoiceEnd, Finished, Generate, Prompt, Timings, Tokens, Usage

from kvd.commands import Abort, ChoiceDone, FinishChoice, Grant, PromptLogprobsOut, RequestDone, RequestFailed, RequestUsage, TokensOut
from kvd.transport.bodies import TextJob, TextResult, check_ids
from kvd.transport.choosing import choice_scores
from kvd.transport.clients import Client
from kvd.transport.constraining import read_constraint
from kvd.transport.credit import StreamCredit
from kvd.transport.drafting import drafted
from kvd.transport.edge import RETRY_AFTER_S, Edge
from kvd.transport.errors import RequestError, bad_request
from kvd.transport.output_rules import check_something_is_left, keep_tokens
from kvd.transport.ports import Detokenizer, Text
from kvd.transport.prompt_echo import prompt_messages, wire_logprob
from kvd.transport.recent import Past, RecentIds
from kvd.transport.stream import ChoiceStream
from kvd.transport.submission import submit_command
from kvd.transport.validation import check_fewest, check_generate, check_id, check_prompt, num_bodies
from kvd.types import RETRYABLE_CODES, Constraint, ErrorCode, FinishReason, unpack_tokens


@dataclass(slots=True)
class _Request:
    client: Client
    message: Generate
    arrived_s: float
    credit: StreamCredit
    constraint: Constraint | None = None
    seed: int = 0
    is_running: bool = False
    is_muted: bool = False
    may_retry: bool = False
    """Once muted: whether the id may be sent again when the engine has let go of it."""
    submitted_s: float = 0.0
    first_token_s: float | None = None
    streams: list[ChoiceStream] = field(default_factory=list)
    tails: dict[int, str] = field(default_factory=dict)
    done: dict[int, ChoiceDone] = field(default_factory=dict)


class Requests:
    """Every generation request of every client."""

    def __init__(self, edge: Edge, next_number: Callable[[], int]) -> None:
        self._edge = edge
        self._next_number = next_number
        self._requests: dict[bytes, _Request] = {}
        self._tokenising: dict[int, _Request] = {}
        self._recent = RecentIds(edge.config.dedupe_capacity)

    def __len__(self) -> int:
        return len(self._requests)

    # -------------------------------------------------------------------------------- from the client

    def begin(self, client: Client, message: Generate, bodies: list[bytes], now: float) -> None:
        """Take a ``generate``.

        Raises:
            RequestError: it is refused.
        """
        check_id("request_id", message.request_id)
        if self._is_redelivery(client, message.request_id):
            self._edge.counters.duplicates += 1
            return
        try:
            self._begin(client, message, bodies, now)
        except RequestError:
            self._recent.add(message.request_id, may_retry=True)  # sent again it is judged again; an abort on its way finds it over
            raise

    def abort(self, client: Client, request_id: bytes, now: float) -> None:
        """Take an ``abort``.

        Raises:
            RequestError: ``not_found``, if the id is neither running for this client nor known to be over.
        """
        request = self._of_client(client, request_id)
        if request is None:
            return
        if request.is_running:
            self._edge.put(Abort(request_id))
        else:
            self._finish(request, RequestUsage(), now)

    def grant(self, client: Client, request_id: bytes, num_tokens: int) -> None:
        """Take a ``credit``.

        Raises:
            RequestError: as for ``abort``, and ``bad_request`` for a number below one.
        """
        if num_tokens < 1:
            raise bad_request(f"num_tokens is {num_tokens}; it must be at least 1")
        request = self._of_client(client, request_id)
        if request is not None and request.message.credit:
            request.credit.allow(num_tokens)
            self._renew(request)

    def on_prompt(self, result: TextResult, now: float) -> bool:
        """A text thread is done with a job; whether the job was a request's (which may have been aborted meanwhile)."""
        request = self._tokenising.pop(result.number, None)
        if request is None:
            return False
        request.client.num_text_jobs -= 1
        if self._requests.get(request.message.request_id) is request:
            try:
                self._submit(request, result, now)
            except RequestError as error:
                self._fail(request, error)
            except Exception as error:  # one request's fault must not end the edge
                self._fail(request, self._edge.internal_error(error))
        return True

    # -------------------------------------------------------------------------------- from the socket

    def on_sent(self, request_id: bytes, num_tokens: int) -> None:
        """A client's socket took a message with so many tokens."""
        self._edge.counters.tokens_sent += num_tokens
        request = self._requests.get(request_id)
        if request is not None:
            request.credit.delivered(num_tokens)
            self._renew(request)

    def forget_client(self, client: Client) -> None:
        """The client is gone: abort its requests and say no more of them."""
        for request_id in tuple(client.request_ids):
            request = self._requests[request_id]
            if request.is_running:
                self._edge.put(Abort(request_id))
                self._edge.counters.requests_aborted += 1
                self._mute(request, may_retry=True)
            else:
                self._edge.counters.requests_aborted += 1
                self._drop(request_id, may_retry=True)

    def abort_client(self, client: Client, now: float) -> None:
        """The client has been silent for too long: abort its requests; it is told in the ordinary way, should it still listen."""
        for request_id in tuple(client.request_ids):
            self.abort(client, request_id, now)

    def fail_client(self, client: Client, error: RequestError) -> None:
        """Fail every request of a client at once."""
        for request_id in tuple(client.request_ids):
            self.fail_one(request_id, error)

    # -------------------------------------------------------------------------------- from the engine

    def on_tokens(self, event: TokensOut, now: float) -> None:
        """Sampled tokens of a choice."""
        request = self._requests.get(event.request_id)
        if request is None or not request.streams:
            return
        if request.first_token_s is None:
            request.first_token_s = now
        stream = request.streams[event.choice]
        had_ended = stream.finish_reason is not None
        delta = stream.push(event.first_index, event.token_ids, event.logprobs)
        if stream.finish_reason is not None and not had_ended:
            self._edge.put(FinishChoice(event.request_id, event.choice))
        if delta.num_dropped:
            request.credit.dropped(delta.num_dropped)
        if delta.num_tokens and not request.is_muted:
            bodies = (delta.token_ids, delta.text.encode("utf-8", "replace")) if request.message.text else (delta.token_ids,)
            header = Tokens(
                request_id=event.request_id,
                choice=event.choice,
                first_index=delta.first_index,
                logprobs=tuple(map(wire_logprob, delta.logprobs)),
            )
            self._edge.send(request.client.peer, header, *bodies, request_id=event.request_id, num_tokens=delta.num_tokens)
        else:
            request.credit.delivered(delta.num_tokens)
            self._renew(request)

    def on_prompt_logprobs(self, event: PromptLogprobsOut) -> None:
        """Log-probabilities of a prompt's next tokens."""
        request = self._requests.get(event.request_id)
        if request is not None and not request.is_muted:
            for header in prompt_messages(event):
                self._edge.send(request.client.peer, header, request_id=event.request_id)

    def on_choice_done(self, event: ChoiceDone) -> None:
        """A choice ended."""
        request = self._requests.get(event.request_id)
        if request is not None and request.streams:
            request.done[event.choice] = event
            request.tails[event.choice] = request.streams[event.choice].finish(event.reason)

    def on_done(self, event: RequestDone, now: float) -> None:
        """The engine's last word on a request that did not fail."""
        request = self._requests.get(event.request_id)
        if request is not None:
            self._finish(request, event.usage, now)

    def on_failed(self, event: RequestFailed) -> None:
        """The engine's last word on a request that failed."""
        request = self._requests.get(event.request_id)
        if request is not None:
            self._fail(request, RequestError(ErrorCode(event.code), event.message, retry_after_s=event.retry_after_s))

    def fail_one(self, request_id: bytes, error: RequestError, *, engine_is_done: bool = False) -> None:
        """Fail a request for a reason of the edge's own; the engine is told to stop."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if engine_is_done or not request.is_running:
            self._fail(request, error)
            return
        self._edge.put(Abort(request_id))
        if not request.is_muted:
            self._send_failed(request, error)
            self._mute(request, may_retry=error.code in RETRYABLE_CODES)

    def on_stopped(self, error: RequestError) -> None:
        """The engine has ended: so has every request."""
        for request in tuple(self._requests.values()):
            self._fail(request, error)

    # -------------------------------------------------------------------------------- inside

    def _is_redelivery(self, client: Client, request_id: bytes) -> bool:
        request = self._requests.get(request_id)
        if request is not None:
            if request.is_muted:
                raise RequestError(ErrorCode.OVERLOADED, "an earlier run of this request is being aborted", retry_after_s=RETRY_AFTER_S)
            if request.client.peer != client.peer:
                raise RequestError(ErrorCode.DUPLICATE, "the request id is in use by another client")
            return True
        if self._recent.look_up(request_id) is Past.OVER:
            self._edge.counters.duplicates += 1
            raise RequestError(ErrorCode.DUPLICATE, "this request is over")
        return False

    def _begin(self, client: Client, message: Generate, bodies: list[bytes], now: float) -> None:
        config = self._edge.config
        hello, text = self._edge.require_ready()
        if client.num_open >= config.max_requests_per_client:
            limit = config.max_requests_per_client
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"a client may have {limit} requests and operations (max_requests_per_client)",
                retry_after_s=RETRY_AFTER_S,
            )
        check_generate(message, max_choices=hello.max_choices, max_stop_strings=config.max_stop_strings, vocab_size=hello.vocab_size)
        if len(bodies) != num_bodies(message):
            raise bad_request(f"generate has {len(bodies)} body frames; it must have {num_bodies(message)}")
        credit = StreamCredit(config.default_credit, message.credit)
        request = _Request(client, message, now, credit, read_constraint(message, bodies))
        request.seed = secrets.randbits(64) if message.sampling.seed is None else message.sampling.seed
        is_truncated = message.truncate_prompt != 0
        if message.input == "ids" and not is_truncated:
            check_prompt((len(bodies[0]) + 3) // 4, message.max_tokens, hello.max_model_len, model_len=hello.model_len)
        check_length = partial(
            check_fewest,
            max_tokens=message.max_tokens,
            max_model_len=hello.max_model_len,
            is_truncated=is_truncated,
            model_len=hello.model_len,
        )
        if message.input == "text":
            check_length(text.fewest_tokens(bodies[0]))
        if message.input == "ids" and not (client.num_text_jobs or is_truncated or message.bad_words or message.echo):
            self._submit(request, TextResult(number=0, token_ids=check_ids(bodies[0], hello.vocab_size)), now)
        else:
            number = self._next_number()
            self._edge.queue_text(
                TextJob(
                    number=number,
                    peer=client.peer,
                    input=message.input,
                    body=bodies[0],
                    vocab_size=hello.vocab_size,
                    template_args=message.template_args,
                    check_length=check_length,
                    tools=bodies[-1] if message.tools else None,
                    keep_tokens=keep_tokens(message, hello.max_model_len),
                    bad_words=message.bad_words,
                    echo=message.echo,
                    is_continued=message.text and not message.constraint,
                )
            )
            client.num_text_jobs += 1
            self._tokenising[number] = request
        self._requests[message.request_id] = request
        client.request_ids.add(message.request_id)
        self._edge.counters.requests += 1

    def _submit(self, request: _Request, prompt: TextResult, now: float) -> None:
        """The prompt is known: hand the request to the engine."""
        message, token_ids = request.message, prompt.require_ids()
        hello, text = self._edge.require_ready()
        max_tokens = check_prompt(len(token_ids) // 4, message.max_tokens, hello.max_model_len, model_len=hello.model_len)
        if message.min_tokens > max_tokens:
            raise bad_request(f"min_tokens is {message.min_tokens}; {max_tokens} output tokens are possible")
        stop_ids = set(message.stop_token_ids)
        if not message.ignore_eos:
            stop_ids.update(text.eos_token_ids)
        early_ids = stop_ids if message.min_tokens else ()
        check_something_is_left(message.sampling, prompt.bad_words, early_ids=early_ids, vocab_size=hello.vocab_size)
        request.streams = _open_streams(message, text, token_ids, frozenset(stop_ids))
        request.submitted_s = now
        self._edge.put_or_refuse(
            submit_command(
                message,
                token_ids,
                tenant=request.client.caller.tenant,
                seed=request.seed,
                max_tokens=max_tokens,
                stop_token_ids=tuple(sorted(stop_ids)),
                credit_tokens=request.credit.take_grant(),
                waited_s=now - request.arrived_s,
                constraint=request.constraint,
                bad_words=prompt.bad_words,
            )
        )
        request.is_running = True
        if message.echo or message.prompt_logprobs is not None:
            bodies = (token_ids, prompt.echo.encode("utf-8", "replace")) if message.echo else ()
            self._edge.send(request.client.peer, Prompt(request_id=message.request_id), *bodies, request_id=message.request_id)

    def _renew(self, request: _Request) -> None:
        if request.is_running and (num_tokens := request.credit.take_grant()):
            self._edge.put(Grant(request.message.request_id, num_tokens))

    def _of_client(self, client: Client, request_id: bytes) -> _Request | None:
        """The running request, None if it is over."""
        check_id("request_id", request_id)
        request = self._requests.get(request_id)
        if request is not None and request.client.peer == client.peer:
            return None if request.is_muted else request
        if self._recent.look_up(request_id) is Past.UNKNOWN:
            raise RequestError(ErrorCode.NOT_FOUND, "no such request; after a restart of the daemon its requests are gone")
        return None

    def _finish(self, request: _Request, usage: RequestUsage, now: float) -> None:
        message = request.message
        if not request.is_muted:
            ends = tuple(self._end(request, choice) for choice in range(message.n))
            total_ms = (now - request.arrived_s) * 1000
            waited_ms = (request.submitted_s - request.arrived_s) * 1000 if request.is_running else total_ms
            ttft_ms = (request.first_token_s - request.arrived_s) * 1000 if request.first_token_s is not None else 0.0
            finished = Finished(
                request_id=message.request_id,
                choices=ends,
                usage=Usage(
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    restored_tokens=usage.restored_tokens,
                    recomputed_tokens=usage.recomputed_tokens,
                    completion_tokens=sum(end.num_tokens for end in ends),
                    **drafted(usage),
                ),
                timings=Timings(queue_ms=round(waited_ms + usage.queue_ms, 3), ttft_ms=round(ttft_ms, 3), total_ms=round(total_ms, 3)),
                seed=request.seed,
            )
            self._edge.send(request.client.peer, finished)
            self._log_finished(finished)
            if any(end.finish_reason == FinishReason.ABORTED for end in ends):
                self._edge.counters.requests_aborted += 1
            else:
                self._edge.counters.requests_finished += 1
        self._drop(message.request_id, may_retry=request.may_retry)

    def _end(self, request: _Request, choice: int) -> ChoiceEnd:
        if not request.streams:
            return ChoiceEnd(choice=choice, finish_reason=FinishReason.ABORTED, num_tokens=0)
        stream = request.streams[choice]
        tail = request.tails.get(choice, "") + stream.finish(FinishReason.ABORTED)
        assert stream.finish_reason is not None
        return ChoiceEnd(
            choice=choice,
            finish_reason=stream.finish_reason,
            num_tokens=stream.num_tokens,
            text_tail=tail if request.message.text else "",
            **choice_scores(request.done.get(choice), stream),
        )

    def _fail(self, request: _Request, error: RequestError) -> None:
        """End a request that the engine does not hold, or no longer holds."""
        if not request.is_muted:
            self._send_failed(request, error)
            request.may_retry = error.code in RETRYABLE_CODES
        self._drop(request.message.request_id, may_retry=request.may_retry)

    def _log_finished(self, finished: Finished) -> None:
        usage, timings = finished.usage, finished.timings
        self._edge.log.info(
            "request_finished",
            request_id=finished.request_id,
            finish_reasons=[str(end.finish_reason) for end in finished.choices],
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_restored_tokens=usage.restored_tokens,
            num_completion_tokens=usage.completion_tokens,
            ttft_ms=timings.ttft_ms,
            total_ms=timings.total_ms,
        )

    def _send_failed(self, request: _Request, error: RequestError) -> None:
        self._edge.log.info("request_failed", request_id=request.message.request_id, code=error.code, error=error.message)
        self._edge.send_failed(request.client.peer, error, request_id=request.message.request_id)
        self._edge.counters.requests_failed += 1

    def _mute(self, request: _Request, *, may_retry: bool) -> None:
        """No more is said of a request; its entry stays until the engine has let go of it."""
        request.is_muted = True
        request.may_retry = may_retry
        request.client.request_ids.discard(request.message.request_id)

    def _drop(self, request_id: bytes, *, may_retry: bool) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.client.request_ids.discard(request_id)
        self._recent.add(request_id, may_retry=may_retry)


def _open_streams(message: Generate, text: Text, token_ids: bytes, silent_ids: frozenset[int]) -> list[ChoiceStream]:
    if not message.text and not message.stop:
        return [ChoiceStream(choice, detokenizer=None, stops=(), silent_ids=silent_ids) for choice in range(message.n)]
    prompt = unpack_tokens(token_ids).tolist()
    return [
        ChoiceStream(
            choice,
            detokenizer=_detokenizer(message, text, prompt),
            stops=message.stop,
            silent_ids=silent_ids,
            include_stop=message.include_stop,
            min_tokens=message.min_tokens,
        )
        for choice in range(message.n)
    ]


def _detokenizer(message: Generate, text: Text, prompt: list[int]) -> Detokenizer:
    detokenizer = text.detokenizer(prompt)
    if message.constraint:
        detokenizer.flush()  # a character that the prompt leaves unfinished is no part of what must match
    return detokenizer
