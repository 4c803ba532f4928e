"""The scheduler with constraints that are lists of words, over the fake executor: what it must say is worked out by a lone runner."""

from __future__ import annotations

from collections import defaultdict, deque

from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager
from kvd.commands import ChoiceDone, RequestDone, RequestFailed, Submit, TokensOut
from kvd.config import SchedulerConfig, SpeculativeConfig
from kvd.executor.fake import EOS_TOKEN_ID, VOCAB_SIZE, FakeRunner
from kvd.scheduler.scheduler import Scheduler
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow, TokenMasks
from kvd.types import BlockId, Constraint, ErrorCode, SamplingParams, pack_tokens, unpack_tokens

NUM_WORDS = -(-VOCAB_SIZE // 32)
GREEDY = SamplingParams(temperature=0.0)


class WordState:
    """Implements the scheduler's ``ConstraintState``: the output is one of some words; what comes after "…" spoils it, and so does "‰" itself."""

    def __init__(self, words):
        self.words = [word.encode() for word in words]
        self.output = b""
        self.has_ended = False
        self.problem = ""
        self.has_strayed = False

    @property
    def is_complete(self):
        return self.output in self.words

    @property
    def is_over(self):
        return self.has_ended or (self.is_complete and not self._next())

    def _next(self):
        return {word[len(self.output)] for word in self.words if word.startswith(self.output) and len(word) > len(self.output)}

    def allowed(self):
        return self._next() | ({EOS_TOKEN_ID} if self.is_complete else set())

    def advance(self, token_id):
        if token_id not in self.allowed():
            self.problem, self.has_strayed = f"{token_id} is not allowed after {self.output!r}", True
        elif token_id == EOS_TOKEN_ID:
            self.has_ended = True
        else:
            self.output += bytes([token_id])
            if self.output.endswith("‰".encode()):
                self.problem = "too many items"

    def num_valid(self, token_ids):
        copy = WordState([])
        copy.words, copy.output = self.words, self.output
        for number, token_id in enumerate(token_ids):
            copy.advance(token_id)
            if copy.problem:
                return number
        return len(token_ids)

    def forced(self, max_tokens):
        copy = WordState([])
        copy.words, copy.output = self.words, self.output
        tokens = []
        while len(tokens) < max_tokens and len(copy.allowed()) == 1 and EOS_TOKEN_ID not in copy.allowed():
            tokens += copy.allowed()
            copy.advance(tokens[-1])
        return tokens

    def mask(self):
        if self.output.endswith("…".encode()):
            self.problem = "out of fuel"
        return sum(1 << token_id for token_id in self.allowed()).to_bytes(4 * NUM_WORDS, "little")


class Words:
    def __init__(self, words):
        self.words = words
        self.problem = ""

    def start(self):
        return WordState(self.words)


class WordCompiler:
    """Implements ``ConstraintCompiler``: a constraint is there at once unless ``holds`` is set; then ``finish`` ends what waits."""

    def __init__(self):
        self.holds = False
        self.is_full = False
        self.tickets = {}
        self.done = {}
        self.forgotten = []
        self.num_masks = 0
        self.num_outgrown = 0
        self._last = 0

    def begin(self, constraint):
        if self.is_full:
            return None
        self._last += 1
        self.tickets[self._last] = constraint
        if not self.holds:
            self.finish(self._last)
        return self._last

    def finish(self, ticket=None):
        for each in [ticket] if ticket else list(self.tickets):
            words = self.tickets[each].source
            self.done[each] = (ErrorCode.BAD_REQUEST, "no words") if not words else Words(words)

    def poll(self, ticket):
        assert ticket in self.tickets, "a ticket is used twice"
        result = self.done.pop(ticket, None)
        if result is not None:
            del self.tickets[ticket]
        return result

    def cancel(self, ticket):
        del self.tickets[ticket]
        self.done.pop(ticket, None)

    def forget(self, constraint, compiled):
        assert isinstance(compiled, Words)
        self.forgotten.append(constraint)

    def stats(self):
        return {"waiting": len(self.tickets)}

    def masks(self, states, drafts):
        masks = []
        for state, draft in zip(states, drafts, strict=True):
            copy = WordState([])
            copy.words, copy.output = state.words, state.output
            masks.append(copy.mask())
            for token_id in draft:
                if not copy.problem:  # as in the library, what gives up at a drafted position gives up for good
                    copy.advance(token_id)
                    assert not copy.problem, "drafts are valid"
                masks.append(copy.mask())
            state.problem = state.problem or copy.problem
        self.num_masks += len(masks)
        return bytearray(b"".join(masks))


def expected(prompt, words, *, max_tokens, sampling=GREEDY, choice=0, min_tokens=0, stop=(EOS_TOKEN_ID,)):
    """(ids, reason) of one choice alone."""
    size = 4  # the fake says other things over other blocks
    num_blocks = (len(prompt) + max_tokens) // size + 1
    runner = FakeRunner(num_blocks, size, max_rows=1)
    state, output = WordState(words), []
    while True:
        masks = TokenMasks([0], [1], NUM_WORDS, state.mask())
        if output:
            step = SchedulerOutput(len(output), (), ContinuedRows([0], [1], [0, 0], []), masks=masks)
        else:
            blocks = tuple(BlockId(index) for index in range(num_blocks))
            row = StartedRow(
                0, pack_tokens(prompt), len(prompt), 0, len(prompt), blocks, sampling, choice, 1, stop if min_tokens else (), min_tokens
            )
            step = SchedulerOutput(0, (row,), ContinuedRows(), masks=masks)
        if len(output) < min_tokens and state.is_complete and state.allowed() <= set(stop):
            return output, "stop"
        (token_id,) = runner.execute(step).token_ids
        output.append(token_id)
        state.advance(token_id)
        assert not state.problem
        if (token_id in stop and len(output) > min_tokens) or state.is_over:
            return output, "stop"
        if len(output) == max_tokens:
            return output, "length"


class FakeClock:
    now_s = 0.0

    def monotonic(self):
        return self.now_s


class ConstraintWorld:
    def __init__(
        self, *, num_blocks=64, block_size=4, max_in_flight=1, max_model_len=64, constraints=True, speculative=True, late=True, **config
    ):
        """``late``: a step may be planned before its masks can be written. The executor computes a step when it is collected, as late as it may."""
        self.config = SchedulerConfig(**{"max_running": 8, "max_waiting": 16, "max_tokens_per_step": 32, "max_choices": 4, **config})
        self.cache = CacheManager(num_blocks=num_blocks, block_size_tokens=block_size)
        self.compiler = WordCompiler()
        self.clock = FakeClock()
        self.runner = FakeRunner(num_blocks, block_size, max_rows=self.config.max_running)
        self.scheduler = Scheduler(
            self.config,
            self.cache,
            self.clock,
            namespace_of=lambda salt, adapter: Namespace(self.runner.fingerprint, salt, adapter),
            max_model_len=max_model_len,
            shared_tile_tokens=block_size,
            constraint_compiler=self.compiler if constraints else None,
            speculative=SpeculativeConfig(speculation="auto") if speculative else None,
            masks_may_be_late=late,
        )
        self.max_in_flight = max_in_flight
        self.in_flight = deque()
        self.tokens = defaultdict(list)
        self.reasons = {}
        self.ends = {}
        self.num_requests = 0

    def submit(self, prompt, words=None, *, max_tokens=20, sampling=GREEDY, stop=(EOS_TOKEN_ID,), credit=1000, **options):
        self.num_requests += 1
        request_id = self.num_requests.to_bytes(16, "big")
        constraint = None if words is None else Constraint("choice", tuple(words))
        command = Submit(
            request_id=request_id,
            token_ids=pack_tokens(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_token_ids=stop,
            credit_tokens=credit,
            constraint=constraint,
            **options,
        )
        self.take(self.scheduler.submit(command))
        return request_id

    def take(self, events):
        for event in events:
            assert event.request_id not in self.ends, "something is told after the end"
            if isinstance(event, TokensOut):
                heard = self.tokens[event.request_id, event.choice]
                assert event.first_index == len(heard)
                heard.extend(unpack_tokens(event.token_ids))
            elif isinstance(event, ChoiceDone):
                self.reasons[event.request_id, event.choice] = event.reason
            elif isinstance(event, RequestDone | RequestFailed):
                self.ends[event.request_id] = event
        self.scheduler.check_invariants()
        self.cache.take_events()

    def round(self):
        self.take(self.scheduler.expire())
        step = None
        if len(self.in_flight) < self.max_in_flight:
            step = self.scheduler.schedule()
            if step is not None:
                self.in_flight.append(step)
        if self.in_flight and (step is None or len(self.in_flight) >= self.max_in_flight):
            oldest = self.in_flight.popleft()
            if oldest.late_masks is not None:
                told = []
                oldest.late_masks.when_told(told.append)  # else the executor would wait for ever
                assert len(told) == 1, "the oldest step in flight has its masks"
            self.take(self.scheduler.update(oldest, self.runner.execute(oldest)))
        return step

    def finish_all(self):
        for _ in range(2000):
            self.round()
            if not self.scheduler.has_work():
                assert not self.compiler.tickets, "a ticket is left"
                assert self.cache.num_tables == 0
                return
        raise AssertionError("it hangs")

    def heard(self, request_id, choice=0):
        return self.tokens[request_id, choice], self.reasons.get((request_id, choice))
