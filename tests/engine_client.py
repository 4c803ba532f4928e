"""The other side of the engine's channels: hears every event, and knows what each must say and why it may come."""

from __future__ import annotations

from functools import lru_cache

from fake_oracle import expected_tokens

from kvd.commands import (
    Abort,
    ChoiceDone,
    FinishChoice,
    Grant,
    OpDone,
    OpFailed,
    PinPrefix,
    RequestDone,
    RequestFailed,
    Snapshot,
    Submit,
    TokensOut,
    Unpin,
)
from kvd.engine.loop import State
from kvd.scheduler.admission import blocks_needed
from kvd.types import ErrorCode, unpack_tokens

BLOCK = 16
POISON = 7
"""The token id that makes logits non-finite; the fake executor never says it."""


@lru_cache(maxsize=8192)
def oracle(packed, num_tokens, sampling, choice):
    return expected_tokens(list(unpack_tokens(packed)), num_tokens, sampling=sampling, choice=choice)


class Expected:
    """One request, from the client's side."""

    def __init__(self, command, max_model_len):
        self.command = command
        self.num_prompt = len(command.token_ids) // 4
        self.max_tokens = min(command.max_tokens, max_model_len - self.num_prompt)
        self.is_poisoned = POISON in unpack_tokens(command.token_ids)
        self.credit = command.credit_tokens
        self.last_grant = (0, 0)
        """Round, and tokens granted in it."""
        self.heard = [[] for _ in range(command.num_choices)]
        self.reasons = {}
        self.cut = set()
        self.is_aborted = False
        self.handed_in = None
        self.terminal = None

    def says(self, choice):
        """All that the choice may ever say."""
        tokens = oracle(self.command.token_ids, self.max_tokens, self.command.sampling, choice)
        for index, token in enumerate(tokens):
            if token in self.command.stop_token_ids:
                return tokens[: index + 1]
        return tokens

    @property
    def code(self):
        return getattr(self.terminal, "code", "done")


class Client:
    def __init__(self, world, max_model_len):
        self.world = world
        self.max_model_len = max_model_len
        self.requests = {}
        self.ops = {}
        self.handed_ops = {}
        self.answers = {}
        self.snapshots = []

    def expect(self, command):
        self.requests[command.request_id] = Expected(command, self.max_model_len)

    def handed(self, command, state):
        """The loop takes a command out of the inbox."""
        if isinstance(command, Grant | Abort | FinishChoice) and command.request_id not in self.requests:
            return
        match command:
            case Submit():
                self.requests[command.request_id].handed_in = state
            case Grant():
                expected, now = self.requests[command.request_id], self.world.round
                expected.credit += command.num_tokens
                before = expected.last_grant[1] if expected.last_grant[0] == now else 0
                expected.last_grant = (now, before + command.num_tokens)
            case Abort():
                self.requests[command.request_id].is_aborted = True
            case FinishChoice():
                self.requests[command.request_id].cut.add(command.choice)
            case _ if getattr(command, "op_id", b"") in self.ops and command is self.ops[command.op_id]:
                self.handed_ops[command.op_id] = state

    def open_requests(self):
        return [each for each, expected in self.requests.items() if expected.handed_in is not None and expected.terminal is None]

    def open_ops(self):
        return [op_id for op_id in self.handed_ops if op_id not in self.answers]

    def take(self, events):
        for event in events:
            match event:
                case TokensOut():
                    self._tokens(self._open(event), event)
                case ChoiceDone():
                    self._choice_done(self._open(event), event)
                case RequestDone():
                    self._done(self._open(event), event)
                case RequestFailed():
                    self._failed(self._open(event), event)
                case OpDone() | OpFailed():
                    self._answer(event)
                case Snapshot():
                    self.snapshots.append(event)
                case _:
                    raise AssertionError(f"the engine says {event}")

    def _open(self, event):
        expected = self.requests[event.request_id]
        assert expected.terminal is None, "an event after the terminal one"
        return expected

    def _tokens(self, expected, event):
        assert not expected.is_poisoned, "a token out of logits that are not finite"
        assert event.choice not in expected.reasons, "a token after its choice is done"
        heard = expected.heard[event.choice]
        assert event.first_index == len(heard)
        heard += unpack_tokens(event.token_ids)
        assert heard == expected.says(event.choice)[: len(heard)], "a wrong token"
        overdraft = expected.command.num_choices
        assert sum(map(len, expected.heard)) <= expected.credit + overdraft, "more tokens than credit"

    def _choice_done(self, expected, event):
        assert event.choice not in expected.reasons
        expected.reasons[event.choice] = event.reason
        heard, says = expected.heard[event.choice], expected.says(event.choice)
        if event.reason == "length":
            assert heard == says
            assert len(heard) == expected.max_tokens
        elif event.reason == "stop":
            assert event.choice in expected.cut or (heard == says and heard[-1] in expected.command.stop_token_ids)
        else:
            assert event.reason == "aborted"
            assert expected.is_aborted or self.is_past_drain, "aborted by nobody"

    def _done(self, expected, event):
        expected.terminal = event
        assert set(expected.reasons) == set(range(expected.command.num_choices)), "a choice is not done"
        usage = event.usage
        assert usage.prompt_tokens == expected.num_prompt
        assert 0 <= usage.restored_tokens + usage.recomputed_tokens <= usage.cached_tokens < expected.num_prompt
        assert usage.queue_ms >= 0.0

    def _failed(self, expected, event):
        expected.terminal = event
        command = expected.command
        assert event.message
        match event.code:
            case ErrorCode.NONFINITE_LOGITS:
                assert expected.is_poisoned, "non-finite logits of somebody else"
            case ErrorCode.CLIENT_TOO_SLOW:
                granted_round, late = expected.last_grant
                credit = expected.credit - (
                    late if granted_round == self.world.round else 0
                )  # it may have come after the end, before its word
                assert credit < command.num_choices * expected.max_tokens
            case ErrorCode.KV_CAPACITY:
                needed = blocks_needed(expected.num_prompt, expected.max_tokens, command.num_choices, BLOCK)
                assert needed > self.world.cache.num_blocks - self.world.cache.max_pinned_blocks, "there is room"
                assert not self.world.has_slept, "told only after a sleep"
            case ErrorCode.PROMPT_TOO_LONG:
                assert expected.num_prompt >= self.max_model_len
            case ErrorCode.BAD_REQUEST:
                most = min(self.world.config.max_choices, self.world.config.max_running)
                assert command.num_choices > most or command.constraint is not None
            case ErrorCode.OVERLOADED:
                assert event.retry_after_s > 0
            case ErrorCode.STARTING:
                assert expected.handed_in is State.REHYDRATING
                assert event.retry_after_s > 0
            case ErrorCode.DRAINING:
                assert expected.handed_in is State.DRAINING or self.is_broken or command.constraint is not None
            case _:
                assert event.code == ErrorCode.ENGINE_ERROR
                assert self.is_broken

    def _answer(self, event):
        assert event.op_id in self.handed_ops, "an answer that nobody asked for"
        assert event.op_id not in self.answers, "a second answer"
        self.answers[event.op_id] = event
        command = self.ops[event.op_id]
        book, cache = self.world.book, self.world.cache
        if isinstance(event, OpFailed):
            self._op_failed(command, event)
        elif isinstance(command, PinPrefix):
            recipe = command.recipe
            assert event.op_id in book.written, "a pin is acknowledged that is not on disk"
            assert event.result["durable"] in {"recipe", "recipe+bytes"}
            if book.last_change(recipe.name) == event.op_id:
                held = cache.pins()[recipe.name]
                assert held.is_pinned
                assert held.token_ids == recipe.token_ids[: len(held.token_ids)]
                assert held.num_blocks == event.result["blocks"] == len(recipe.token_ids) // (4 * BLOCK)
                assert book.durable[recipe.name] == recipe
        elif isinstance(command, Unpin):
            assert event.op_id in book.written, "an unpin is acknowledged that is not on disk"
            if book.last_change(command.name) == event.op_id:
                assert command.name not in cache.pins()

    def _op_failed(self, command, event):
        assert event.message
        if not isinstance(command, PinPrefix):
            return
        recipe = command.recipe
        num_blocks = len(recipe.token_ids) // (4 * BLOCK)
        match event.code:
            case ErrorCode.STORAGE_ERROR:
                assert event.op_id in self.world.book.failed
            case ErrorCode.NONFINITE_LOGITS:
                assert POISON in unpack_tokens(recipe.token_ids)
            case ErrorCode.KV_CAPACITY:
                assert num_blocks + 1 > self.world.cache.num_blocks - self.world.cache.max_pinned_blocks, "there is room for the prefix"
            case ErrorCode.PIN_TOO_SHORT:
                assert num_blocks == 0

    @property
    def is_broken(self):
        executor = self.world.executor
        return getattr(executor, "is_dead", False)

    @property
    def is_past_drain(self):
        return self.world.clock.now_s >= self.world.drain_deadline_s
