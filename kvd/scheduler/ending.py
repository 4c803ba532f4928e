"""What is told of a request, and how it ends: exactly one terminal event, whatever happens."""

from __future__ import annotations

from collections import Counter

from kvd.commands import ChoiceDone, Event, RequestDone, RequestFailed, RequestUsage, TokensOut
from kvd.scheduler.ports import Clock
from kvd.scheduler.request import Leaving, Request, Sequence
from kvd.scheduler.retry import RetryEstimate
from kvd.scheduler.roster import Roster
from kvd.types import ErrorCode, FinishReason, TokenLogprobs


class Endings:
    """The live requests by id, and the events that wait to be taken."""

    def __init__(self, roster: Roster, clock: Clock, counters: Counter[str]) -> None:
        self.requests: dict[bytes, Request] = {}
        self._roster = roster
        self._clock = clock
        self._counters = counters
        self._events: list[Event] = []
        self._retry = RetryEstimate()

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def retry_after_s(self, num_waiting: int) -> float:
        return self._retry.seconds(num_waiting)

    def tell_token(self, sequence: Sequence, first_index: int, packed: bytes, logprob: TokenLogprobs | None) -> None:
        request = sequence.request
        if not request.is_internal:
            logprobs = None if logprob is None else (logprob,)
            self._events.append(TokensOut(request.command.request_id, sequence.choice, first_index, packed, logprobs))

    def end_choice(self, sequence: Sequence, reason: FinishReason) -> None:
        """A choice is over, and with the last one its request."""
        request = sequence.request
        self._tell_choice_done(request, sequence.choice, reason)
        self._roster.retire(sequence, Leaving.OVER)
        if len(request.ended_choices) == request.command.num_choices:
            self._finish(request)

    def abort(self, request: Request) -> None:
        """Every open choice is over, those not forked yet included."""
        for choice in range(request.command.num_choices):
            if choice not in request.ended_choices:
                self._tell_choice_done(request, choice, FinishReason.ABORTED)
        self._finish(request)

    def fail(self, request: Request, code: ErrorCode, message: str, retry_after_s: float = 0.0) -> None:
        self._counters["failed"] += 1
        self._retry.note_end(self._clock.monotonic())
        self._events.append(RequestFailed(request.request_id, code, message, retry_after_s))
        self._forget(request)

    def _tell_choice_done(self, request: Request, choice: int, reason: FinishReason) -> None:
        request.ended_choices.add(choice)
        if not request.is_internal:
            self._events.append(ChoiceDone(request.request_id, choice, reason))

    def _finish(self, request: Request) -> None:
        self._counters["finished"] += 1
        now_s = self._clock.monotonic()
        self._retry.note_end(now_s)
        began_s = request.first_run_s if request.first_run_s is not None else now_s
        usage = RequestUsage(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.cached_tokens,
            restored_tokens=request.restored_tokens,
            recomputed_tokens=request.recomputed_tokens,
            queue_ms=(began_s - request.submitted_s) * 1000,
            num_preemptions=request.num_preemptions,
        )
        self._events.append(RequestDone(request.request_id, usage))
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.is_over = True
        del self.requests[request.request_id]
        self._roster.forget(request)
