"""Scheduler and cache over the fake executor, or over another runner, for requests that are told at their end: what comes out is compared with a plain search over the fake alone."""

from __future__ import annotations

from collections import deque

from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager
from kvd.commands import ChoiceDone, RequestDone, RequestFailed, Submit, TokensOut
from kvd.config import SchedulerConfig
from kvd.executor.fake import FakeRunner
from kvd.scheduler.scheduler import Scheduler
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow
from kvd.types import BlockId, SamplingParams, pack_tokens, unpack_tokens

GREEDY = SamplingParams(temperature=0.0)


class FakeModel:
    """Log-probabilities over the fake's vocabulary after a text."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.known = {}

    def logprobs(self, tokens):
        if tokens not in self.known:
            count = len(tokens)
            runner = FakeRunner(count // self.block_size + 1, self.block_size, max_rows=1)
            row = StartedRow(
                row=0,
                token_ids=pack_tokens(list(tokens)),
                num_prompt_tokens=count,
                num_computed=0,
                num_tokens=count,
                block_ids=tuple(BlockId(block) for block in range(count // self.block_size + 1)),
                sampling=SamplingParams(temperature=0.0, num_logprobs=257),
            )
            output = runner.execute(SchedulerOutput(0, (row,), ContinuedRows()))
            ranked = dict(output.logprobs[0].top)
            self.known[tokens] = [ranked[token] for token in range(257)]
        return self.known[tokens]


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s


def namespace_of(salt, adapter):
    return Namespace(b"fingerprint", salt, adapter)


class World:
    def __init__(
        self,
        *,
        num_blocks=200,
        block_size=4,
        max_model_len=200,
        max_in_flight=1,
        poison=None,
        runner=None,
        speculative=None,
        has_draft_model=False,
        **config,
    ):
        config = {"max_running": 16, "max_waiting": 64, "max_tokens_per_step": 64, "max_choices": 16, **config}
        self.cache = CacheManager(num_blocks=num_blocks, block_size_tokens=block_size)
        self.runner = runner or FakeRunner(num_blocks, block_size, max_rows=config["max_running"], poison_token_id=poison)
        self.clock = Clock()
        self.scheduler = Scheduler(
            SchedulerConfig(**config),
            self.cache,
            self.clock,
            namespace_of=namespace_of,
            max_model_len=max_model_len,
            shared_tile_tokens=block_size,
            speculative=speculative,
            has_draft_model=has_draft_model,
        )
        self.max_in_flight = max_in_flight
        self.in_flight = deque()
        self.steps = []
        self.told = {}
        self.ends = {}
        self.terminal = {}

    def submit(self, prompt, **options):
        request_id = len(self.told).to_bytes(16, "big")
        options.setdefault("sampling", GREEDY)
        options.setdefault("credit_tokens", 1000)
        self.told[request_id], self.ends[request_id] = {}, {}
        self.take(self.scheduler.submit(Submit(request_id=request_id, token_ids=pack_tokens(list(prompt)), **options)))
        return request_id

    def take(self, events):
        for event in events:
            assert event.request_id not in self.terminal, "nothing comes after the terminal event"
            match event:
                case TokensOut():
                    said = self.told[event.request_id].setdefault(event.choice, [])
                    assert event.first_index == len(said)
                    tokens = list(unpack_tokens(event.token_ids))
                    said += zip(tokens, event.logprobs or [None] * len(tokens), strict=True)
                case ChoiceDone():
                    assert event.choice not in self.ends[event.request_id]
                    self.ends[event.request_id][event.choice] = event
                case RequestDone() | RequestFailed():
                    self.terminal[event.request_id] = event

    def round(self):
        step = self.scheduler.schedule() if len(self.in_flight) < self.max_in_flight else None
        if step is not None:
            self.steps.append(step)
            self.in_flight.append((step, self.runner.execute(step)))
        if self.in_flight and (step is None or len(self.in_flight) >= self.max_in_flight):
            self.take(self.scheduler.update(*self.in_flight.popleft()))
        self.take(self.scheduler.expire())
        self.scheduler.check_invariants()
        return step

    def finish(self, max_rounds=3000):
        for _ in range(max_rounds):
            if not self.scheduler.has_work():
                break
            self.round()
        assert not self.scheduler.has_work(), "a request hangs"
        self.scheduler.check_invariants()
        assert self.cache.num_used == 0
        assert self.terminal.keys() == self.told.keys()

    def said(self, request_id):
        """Of each choice in order: its tokens and its score."""
        told, ends = self.told[request_id], self.ends[request_id]
        return [(tuple(token for token, _ in told.get(choice, [])), ends[choice].score) for choice in sorted(ends)]
