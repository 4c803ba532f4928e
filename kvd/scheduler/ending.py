"""What is told of a request, and how it ends: exactly one terminal event, whatever happens."""

from __future__ import annotations

from collections import Counter

from kvd.commands import ChoiceDone, Event, PromptLogprobsOut, RequestDone, RequestFailed, RequestUsage, TokensOut
from kvd.scheduler.held import HeldChoice
from kvd.scheduler.ports import Clock
from kvd.scheduler.request import Leaving, Request, Sequence
from kvd.scheduler.retry import RetryEstimate
from kvd.scheduler.roster import Roster
from kvd.types import ErrorCode, FinishReason, TokenLogprobs


class Endings:
    """The live requests by id, and the events that wait to be taken."""

    def __init__(self, roster: Roster, clock: Clock, counters: Counter[str]) -> None:
        self.requests: dict[bytes, Request] = {}
        self.num_speculating = 0
        """Live requests that may draft."""
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

    def retry_after_s(self, priority: int) -> float:
        """When a request of this class that was refused or timed out should come again."""
        return self._retry.seconds(self._roster.queue.num_until(priority))

    def add(self, request: Request) -> None:
        """The request is accepted."""
        if not self.requests:
            self._retry.note_busy(self._clock.monotonic())
        self.requests[request.request_id] = request
        self.num_speculating += request.speculation.mode != "off"

    def tell_prompt(self, request: Request, first_position: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        self._events.append(PromptLogprobsOut(request.request_id, first_position, logprobs))

    def tell_token(self, sequence: Sequence, first_index: int, packed: bytes, logprob: TokenLogprobs | None) -> None:
        request = sequence.request
        if request.held is not None:
            assert logprob is not None, "a row whose choice is held asks for log-probabilities"
            request.held.add_token(sequence.choice, packed, logprob)
        elif not request.is_internal:
            logprobs = None if logprob is None else (logprob,)
            self._events.append(TokensOut(request.command.request_id, sequence.choice, first_index, packed, logprobs))

    def end_choice(self, sequence: Sequence, reason: FinishReason) -> None:
        """A choice is over, and with the last one its request."""
        request = sequence.request
        request.ended_choices.add(sequence.choice)
        if request.held is not None:
            request.held.end(sequence.choice, reason)
        else:
            self._tell_choice_done(request, sequence.choice, reason)
        self._roster.retire(sequence, Leaving.OVER)
        if len(request.ended_choices) == request.num_sampled:
            self._tell_held(request)
            self._finish(request)

    def end_search(self, request: Request, finished: list[HeldChoice]) -> None:
        """A beam search is over, and with it its request."""
        assert request.held is not None, "beams are told at the end"
        for choice in finished:
            request.held.add(choice)
        self._tell_held(request)
        self._finish(request)

    def abort(self, request: Request) -> None:
        """Every open choice is over, those not forked yet included."""
        for choice in range(request.command.num_choices):
            if choice not in request.ended_choices or request.held is not None:
                self._tell_choice_done(request, choice, FinishReason.ABORTED)
        self._finish(request)

    def fail(self, request: Request, code: ErrorCode, message: str, retry_after_s: float = 0.0) -> None:
        self._counters["failed"] += 1
        if request.first_run_s is not None:
            self._retry.note_end(self._clock.monotonic())
        self._events.append(RequestFailed(request.request_id, code, message, retry_after_s))
        self._forget(request)

    def _tell_choice_done(self, request: Request, choice: int, reason: FinishReason) -> None:
        if not request.is_internal:
            self._events.append(ChoiceDone(request.request_id, choice, reason))

    def _tell_held(self, request: Request) -> None:
        if request.held is not None and not request.is_internal:
            self._events += request.held.tell(request.request_id, request.command.num_choices)

    def _finish(self, request: Request) -> None:
        self._counters["finished"] += 1
        now_s = self._clock.monotonic()
        if request.first_run_s is not None:
            self._retry.note_end(now_s)
        began_s = request.first_run_s if request.first_run_s is not None else now_s
        usage = RequestUsage(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.cached_tokens,
            restored_tokens=request.restored_tokens,
            recomputed_tokens=request.recomputed_tokens,
            queue_ms=(began_s - request.submitted_s) * 1000,
            num_preemptions=request.num_preemptions,
            drafted_tokens=request.drafted_tokens,
            accepted_tokens=request.accepted_tokens,
        )
        self._events.append(RequestDone(request.request_id, usage))
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.is_over = True
        request.constraint = None
        del self.requests[request.request_id]
        self.num_speculating -= request.speculation.mode != "off"
        self._roster.forget(request)
