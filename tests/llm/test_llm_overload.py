"""What a batch does when the engine has no place, or no time: it comes again for a place, and its own times go on meanwhile."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator

import pytest
from kvd_client.errors import AdapterCapacity, BadRequest, DeadlineExceeded, KvdError, Overloaded, QueueTimeout, Timeout
from kvd_client.results import Choice, Completion, Timings, Usage

import kvd
from kvd.llm import _Batch

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

LATE_S = 5.0
"""Far more than a busy machine adds to a time, far less than what is waited for."""


@pytest.fixture(scope="module")
def small() -> Iterator[kvd.LLM]:
    """One runs, two wait."""
    with kvd.LLM(executor="fake", kv_memory="8MiB", max_running=1, max_waiting=2, fake_step_ms=20.0) as engine:
        yield engine


@contextlib.contextmanager
def taken(engine: kvd.LLM, num_places: int) -> Iterator[None]:
    """So many requests that take longer than any test: the first runs, the others wait."""
    with contextlib.ExitStack() as streams:
        for number in range(num_places):
            stream = engine.client.generate(f"long {number}", stream=True, max_tokens=5000, ignore_eos=True, window_tokens=6000)
            streams.enter_context(stream)
            if not number:
                next(iter(stream))
        yield


@contextlib.contextmanager
def raises_after(kind: type[KvdError], seconds: float) -> Iterator[None]:
    begun_s = time.monotonic()
    with pytest.raises(kind) as raised:
        yield
    assert raised.type is kind
    assert seconds - 0.05 <= time.monotonic() - begun_s < seconds + LATE_S


@pytest.mark.parametrize("num_taken", [1, 2, 3], ids=["it waits in the queue", "it waits beside another", "there is no place in the queue"])
@pytest.mark.parametrize(
    ("options", "kind", "seconds"),
    [
        ({"queue_timeout_s": 0.4}, QueueTimeout, 0.4),
        ({"deadline_s": 0.4}, DeadlineExceeded, 0.4),
        ({"queue_timeout_s": 0.4, "deadline_s": 30.0}, QueueTimeout, 0.4),
        ({"queue_timeout_s": 30.0, "deadline_s": 0.4}, DeadlineExceeded, 0.4),
    ],
)
def test_a_requests_own_times_end_it_whatever_it_waits_for(small, num_taken, options, kind, seconds):
    with taken(small, num_taken), raises_after(kind, seconds):
        small.generate("x", max_tokens=2, progress=False, **options)
    in_time = dict.fromkeys(options, 60.0)  # a place is free again, whenever the engine learns that those who had them are gone
    assert small.generate("x", max_tokens=2, progress=False, **in_time)[0].usage.completion_tokens == 2


def test_the_time_for_the_batch_ends_a_wait_for_a_place(small):
    with taken(small, 3), raises_after(Timeout, 0.4):
        small.generate("x", max_tokens=2, progress=False, timeout_s=0.4)


def test_one_that_was_refused_a_place_ends_in_time_beside_others_of_its_batch(small):
    with taken(small, 2), raises_after(DeadlineExceeded, 0.5):
        small.generate(["waits for long", "x"], [{}, {"deadline_s": 0.5}], max_tokens=2, progress=False)


def test_for_a_place_it_comes_again_as_long_as_it_takes():
    with kvd.LLM(executor="fake", kv_memory="8MiB", max_running=1, max_waiting=1, max_text_jobs=1, max_requests_per_client=2) as tiny:
        answers: dict[int, int] = {}

        def ask(number: int) -> None:
            answers[number] = len(tiny.generate([f"{number}.{each}" for each in range(6)], max_tokens=40, ignore_eos=True, progress=False))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == dict.fromkeys(range(4), 6)


class Engine:
    """Ends every request at once, with the next of these."""

    def __init__(self, *ends: KvdError | None) -> None:
        self._ends = list(ends)
        self.asked: list[tuple[float, float]] = []

    def open(self, call) -> None:
        self.asked.append((call.message.deadline_s, call.message.queue_timeout_s))
        completion = Completion(b"", (Choice(0, "", (), "length"),), Usage(), Timings(queue_ms=0, ttft_ms=0, total_ms=0), 0)
        call.deliver((self._ends.pop(0) if self._ends else None) or completion)


def overloaded(message: str) -> Overloaded:
    return Overloaded(message, code="overloaded", retryable=True)


PLACES = [
    "5 requests wait for a place, the limit is 5 (max_waiting)",
    "5 requests wait for adapters, the limit is 5 (max_waiting)",
    "too many constraints wait to be compiled (grammar.max_waiting_constraints)",
    "a client may have 5 requests and operations (max_requests_per_client)",
    "too many prompts wait to be tokenised (max_text_bytes)",
    "too many commands wait for the engine (inbox_capacity)",
]


@pytest.mark.parametrize("message", PLACES)
def test_every_refusal_of_a_place_is_known(message):
    engine = Engine(*[overloaded(message)] * 5, None)
    assert len(_Batch(engine, [("x", {"deadline_s": 30.0, "queue_timeout_s": 20.0})]).run(4, None, time.monotonic() + 60)) == 1
    assert engine.asked[0] == (30.0, 20.0)
    assert all(30.0 - late[0] == pytest.approx(20.0 - late[1]) for late in engine.asked)
    assert [late[0] for late in engine.asked] == sorted((late[0] for late in engine.asked), reverse=True), "the clocks begin anew"
    assert 0.4 < 30.0 - engine.asked[-1][0] < 10.0


def test_after_a_refusal_more_are_handed_over_again_as_others_end():
    engine = Engine(*[overloaded(PLACES[0])] * 3)
    batch = _Batch(engine, [("x", {})] * 20)
    num_open: list[int] = []

    class Counted:
        def open(self, call) -> None:
            num_open.append(len(batch._calls))
            engine.open(call)

    batch._engine = Counted()
    assert len(batch.run(4, None, time.monotonic() + 60)) == 20
    assert num_open[:4] == [1, 2, 3, 4]
    assert max(num_open) == 4, "more than may be"
    assert num_open[4:].count(4) > 5, "those that may be open stay few"


@pytest.mark.parametrize("message", ["the constraint waited for others to be compiled for 40 s", "why (max_running)", "why (because)"])
def test_another_reason_is_told_after_a_few_tries(message):
    engine = Engine(*[overloaded(message)] * 9)
    with pytest.raises(Overloaded, match=re.escape(message)) as raised:
        _Batch(engine, [("x", {})]).run(4, None, time.monotonic() + 60)
    assert len(engine.asked) == 3
    assert raised.value.__notes__ == ["of prompts[0], of 1"]


@pytest.mark.parametrize("kind", [QueueTimeout, AdapterCapacity, DeadlineExceeded])
def test_what_is_more_than_overloaded_is_told_at_once(kind):
    engine = Engine(kind("x (max_waiting)", code="x"), None)
    with pytest.raises(kind):
        _Batch(engine, [("x", {})]).run(4, None, time.monotonic() + 60)
    assert len(engine.asked) == 1


@pytest.mark.parametrize("prompt", [b"ab", bytearray(b"ab"), memoryview(b"ab"), [True, False], [1.5], 5, [None], [["a"]], {"a": 1}])
def test_what_is_no_prompt_is_refused(small, prompt):
    with pytest.raises((BadRequest, TypeError)):
        small.generate(prompt, max_tokens=1, progress=False)
    with pytest.raises(BadRequest) as refused:
        small.generate(["fine", prompt], max_tokens=1, progress=False)
    assert refused.value.__notes__ == ["of prompts[1], of 2"]


@pytest.mark.torch
def test_ids_of_numpy_and_torch_are_ids(small):
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    wanted = small.generate([97, 98], max_tokens=3, temperature=0.0, progress=False)[0].token_ids
    for ids in (np.array([97, 98]), torch.tensor([97, 98])):
        for prompt in (ids, [ids], ids[None], list(ids), [list(ids)], tuple(ids)):
            (answer,) = small.generate(prompt, max_tokens=3, temperature=0.0, progress=False)
            assert answer.token_ids == wanted
    for prompt in (np.array([1.0]), torch.ones(2), torch.tensor([True]), np.array([True])):
        with pytest.raises(BadRequest, match=r"token id 0 is|only integer tensors"):
            small.generate(prompt, max_tokens=1, progress=False)
    assert len(small.generate(np.array(["a", "b"]), max_tokens=1, progress=False)) == 2
