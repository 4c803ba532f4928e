"""Follows a scheduler's events as a client would, and checks each token against the reference."""

from __future__ import annotations

from content_executor import reference

from kvd.cache.hashing import Namespace
from kvd.commands import ChoiceDone, RequestDone, RequestFailed, Submit, TokensOut
from kvd.types import SamplingParams, pack_tokens, unpack_tokens


class FakeClock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s


def namespace_of(salt: bytes, adapter: bytes) -> Namespace:
    return Namespace(b"fingerprint", salt, adapter)


class Expected:
    def __init__(self, command: Submit, max_model_len: int, vocab: int, *, internal: bool):
        self.command = command
        prompt = list(unpack_tokens(command.token_ids))
        limit = min(command.max_tokens, max_model_len - len(prompt))
        self.says = [
            reference(prompt, choice, max_tokens=limit, vocab=vocab, stop=command.stop_token_ids, min_tokens=command.min_tokens)
            for choice in range(command.num_choices)
        ]
        self.max_tokens = limit
        self.internal = internal
        self.heard = [0] * command.num_choices
        self.reasons: dict[int, str] = {}
        self.cut: set[int] = set()
        self.terminal: RequestDone | RequestFailed | None = None


class StreamChecker:
    def __init__(self, max_model_len: int, vocab: int = 2):
        self.max_model_len, self.vocab = max_model_len, vocab
        self.requests: dict[bytes, Expected] = {}

    def submit(self, scheduler, prompt, *, internal=False, background=False, **options):
        request_id = len(self.requests).to_bytes(16, "big")
        options.setdefault("credit_tokens", 1000)
        command = Submit(request_id=request_id, token_ids=pack_tokens(prompt), sampling=SamplingParams(num_logprobs=0), **options)
        self.requests[request_id] = Expected(command, self.max_model_len, self.vocab, internal=internal)
        self.take(scheduler.submit(command, internal=internal, background=background))
        return request_id

    def open(self) -> list[bytes]:
        return [request_id for request_id, expected in self.requests.items() if expected.terminal is None]

    def credit_owed(self, request_id) -> int:
        return self.requests[request_id].command.credit_tokens

    def take(self, events):
        for event in events:
            expected = self.requests[event.request_id]
            assert expected.terminal is None, "nothing comes after the terminal event"
            match event:
                case TokensOut():
                    self._token(expected, event)
                case ChoiceDone():
                    self._choice_done(expected, event)
                case RequestDone() | RequestFailed():
                    expected.terminal = event
                    if isinstance(event, RequestDone) and not expected.internal:
                        assert set(expected.reasons) == set(range(expected.command.num_choices))

    def _token(self, expected, event):
        assert not expected.internal
        assert event.choice not in expected.reasons
        assert event.first_index == expected.heard[event.choice]
        (token,) = unpack_tokens(event.token_ids)
        said = (token, event.logprobs[0].logprob)
        assert said == expected.says[event.choice][event.first_index], "a token over wrong KV"
        expected.heard[event.choice] += 1

    def _choice_done(self, expected, event):
        assert not expected.internal
        assert event.choice not in expected.reasons
        expected.reasons[event.choice] = event.reason
        says, heard = expected.says[event.choice], expected.heard[event.choice]
        if event.reason == "length":
            if expected.command.may_shorten:
                assert 1 <= heard <= expected.max_tokens
            else:
                assert heard == len(says) == expected.max_tokens
        elif event.reason == "stop" and event.choice not in expected.cut:
            assert heard == len(says)
            assert says[-1][0] in expected.command.stop_token_ids
