"""Growth of the engine's work, by counting the calls that it makes: no clock, so that no neighbour can fail it."""

from __future__ import annotations

import sys

import pytest
from engine_alone import BLOCK, EngineAlone, namespace_of, prompt_of


def calls_of(work):
    """Calls of Python and C functions while ``work`` runs."""
    count = 0

    def note(_frame, event, _argument):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def decoding(num_streams, *, num_cached=0, num_waiting=0, num_pins=0, shared=False):
    """An engine whose streams decode, and a function that runs one step of it."""
    engine = EngineAlone(num_blocks=num_cached * 2 + num_streams * 40 + 200, max_running=num_streams, max_tokens_per_step=1 << 16)
    if num_cached:
        engine.fill_cache(num_cached, chain=64)
    for number in range(num_pins):
        engine.cache.pin(str(number), prompt_of(number, BLOCK), namespace_of(b"cached", b""))
    for number in range(num_streams + num_waiting):
        prompt = prompt_of(0, 8 * BLOCK) + prompt_of(number, 9) if shared else prompt_of(number, 8 * BLOCK + 9)
        engine.scheduler.submit(engine.command(prompt, request=number))

    def step():
        out = engine.scheduler.schedule()
        engine.scheduler.update(out, engine.runner.execute(out))
        engine.cache.take_events()
        return out

    for _ in range(4):
        out = step()
    assert len(out.continued.rows) == num_streams
    assert engine.scheduler.num_waiting == num_waiting
    assert bool(out.shared_runs.rows) == (shared and num_streams > 1)
    return engine, step


def test_a_step_costs_the_same_for_every_stream():
    few, many = (calls_of(decoding(count)[1]) for count in (8, 128))
    assert many <= 16 * few


@pytest.mark.parametrize(
    ("few", "many"),
    [
        ({}, {"num_cached": 6400}),
        ({"num_waiting": 1}, {"num_waiting": 512}),
        ({"num_cached": 64, "num_pins": 1}, {"num_cached": 64_000, "num_pins": 1000}),
    ],
)
def test_what_only_lies_there_costs_a_step_nothing(few, many):
    assert calls_of(decoding(8, **many)[1]) == calls_of(decoding(8, **few)[1])


def test_shared_runs_cost_a_steady_step_nothing():
    assert calls_of(decoding(64, shared=True)[1]) == calls_of(decoding(64)[1])


@pytest.mark.parametrize("shared", [False, True])
def test_a_row_that_begins_and_ends_costs_at_most_its_part_of_those_who_run(shared):
    """Beside sixteen times as many streams, at most so many times the work; and of a step, that is little."""

    def begin_and_end(num_streams):
        engine, step = decoding(num_streams, num_waiting=1, shared=shared)
        return calls_of(lambda: (engine.scheduler.abort((0).to_bytes(16, "big")), step())) - calls_of(step)

    few, many = begin_and_end(8), begin_and_end(128)
    assert many <= few + 200


def test_a_prompt_costs_what_it_is_long():
    def serve(length):
        engine = EngineAlone(num_blocks=length // BLOCK + 10, max_running=2, max_tokens_per_step=512)

        def all_steps():
            engine.scheduler.submit(engine.command(prompt_of(1, length), request=1, max_tokens=1))
            while engine.scheduler.has_work():
                out = engine.scheduler.schedule()
                engine.scheduler.update(out, engine.runner.execute(out))

        return calls_of(all_steps)

    assert serve(8192) <= 64 * serve(128)


def test_one_who_waits_for_blocks_costs_a_step_nothing_however_long_its_prompt_is():
    """Eight streams decode; the head of the queue has a place and lacks blocks, with or without 500 of its own in the cache."""

    def step_beside(num_cached, num_waiting_blocks):
        engine = EngineAlone(num_blocks=num_cached + 8 * 10 + 8, max_running=16, max_tokens_per_step=1 << 16)
        tokens = prompt_of(1000, (num_cached + num_waiting_blocks) * BLOCK)

        def step():
            out = engine.scheduler.schedule()
            engine.scheduler.update(out, engine.runner.execute(out))
            engine.cache.take_events()

        if num_cached:
            engine.scheduler.submit(engine.command(tokens[: num_cached * BLOCK * 4], request=1000, max_tokens=1))
            step()
        for number in range(8):
            engine.scheduler.submit(engine.command(prompt_of(number, 8 * BLOCK + 9), request=number))
        for _ in range(4):
            step()
        engine.scheduler.submit(engine.command(tokens, request=1001, max_tokens=1))
        step()
        assert engine.scheduler.num_waiting == 1
        assert engine.cache.match(tokens, namespace_of(b"", b"")).num_tokens == num_cached * BLOCK
        return step

    assert calls_of(step_beside(500, 40)) == calls_of(step_beside(0, 10))
