"""What can never fit model or pool is refused at once with the numbers, or cut where nobody asked for it; what pins made impossible fails."""

from __future__ import annotations

import pytest
from roomy_simulation import make, prompt
from stream_checker import namespace_of

from kvd.types import ErrorCode, pack_tokens


@pytest.mark.parametrize(
    ("options", "code", "numbers"),
    [
        ({"prompt": prompt(64), "max_tokens": 1}, ErrorCode.PROMPT_TOO_LONG, ("64",)),
        ({"prompt": [1], "max_tokens": 0}, ErrorCode.BAD_REQUEST, ("0",)),
        ({"prompt": [1], "max_tokens": 1, "num_choices": 4}, ErrorCode.BAD_REQUEST, ("4", "3")),
        ({"prompt": [1], "max_tokens": 1, "num_choices": 0}, ErrorCode.BAD_REQUEST, ("0",)),
        ({"prompt": prompt(33), "max_tokens": 9}, ErrorCode.KV_CAPACITY, ("11", "10")),
        ({"prompt": prompt(17), "max_tokens": 9, "num_choices": 3}, ErrorCode.KV_CAPACITY, ("13", "10")),
    ],
)
def test_what_can_never_fit_is_refused_at_once_with_the_numbers(options, code, numbers):
    sim = make(num_blocks=10)
    request_id = sim.submit(options.pop("prompt"), **options)
    failed = sim.terminal(request_id)
    assert failed.code == code
    for number in numbers:
        assert number in failed.message
    assert not sim.scheduler.has_work()


@pytest.mark.parametrize(("num_prompt", "max_tokens", "num_choices"), [(33, 8, 1), (17, 4, 3), (36, 5, 1), (20, 1, 3)])
def test_what_just_fits_is_served(num_prompt, max_tokens, num_choices):
    sim = make(num_blocks=10)
    request_id = sim.submit(prompt(num_prompt), max_tokens=max_tokens, num_choices=num_choices)
    sim.finish_all()
    assert sim.code(request_id) == "done"
    assert sim.heard(request_id) == [max_tokens] * num_choices


def test_max_tokens_is_cut_to_what_fits_the_model():
    sim = make()
    request_id = sim.submit(prompt(60), max_tokens=1000)
    sim.finish_all()
    assert sim.heard(request_id) == [4]


@pytest.mark.parametrize(("num_prompt", "num_choices", "most"), [(33, 1, 8), (17, 3, 8), (36, 1, 5), (25, 1, 16)])
def test_a_length_that_nobody_asked_for_is_cut_to_what_the_pool_has(num_prompt, num_choices, most):
    sim = make(num_blocks=10)
    request_id = sim.submit(prompt(num_prompt), max_tokens=64, num_choices=num_choices, may_shorten=True)
    sim.finish_all()
    assert sim.code(request_id) == "done"
    assert sim.heard(request_id) == [most] * num_choices


def test_a_length_that_nobody_asked_for_is_cut_to_what_pins_leave():
    sim = make(num_blocks=10, max_pinned_fraction=0.5)
    sim.submit(prompt(17, 1), max_tokens=1)
    sim.finish_all()
    sim.cache.pin("p", pack_tokens(prompt(16, 1)), namespace_of(b"", b""))
    other = sim.submit(prompt(10, 2), max_tokens=64, may_shorten=True)
    sim.finish_all()
    assert sim.heard(other) == [15]


def test_pins_count_against_what_can_fit_unless_they_are_the_requests_own():
    sim = make(num_blocks=10, max_pinned_fraction=0.5)
    sim.submit(prompt(17, 1), max_tokens=1)
    sim.finish_all()
    sim.cache.pin("p", pack_tokens(prompt(16, 1)), namespace_of(b"", b""))
    other = sim.submit(prompt(25, 2), max_tokens=1)
    assert sim.code(other) == ErrorCode.KV_CAPACITY
    own = sim.submit([*prompt(17, 1), *prompt(15, 2)], max_tokens=4)
    sim.finish_all()
    assert sim.code(own) == "done"


def test_a_request_that_pins_made_impossible_fails_instead_of_hanging():
    sim = make(num_blocks=10, max_pinned_fraction=0.5)
    sim.submit(prompt(17, 1), max_tokens=1)
    sim.finish_all()
    doomed = sim.submit(prompt(17, 2), max_tokens=20)
    for _ in range(5):
        sim.round()
    sim.cache.pin("p", pack_tokens(prompt(16, 1)), namespace_of(b"", b""))
    waiting = sim.submit(prompt(5, 5), max_tokens=1)
    sim.finish_all()
    assert sim.code(doomed) == ErrorCode.KV_CAPACITY
    assert "10" in sim.terminal(doomed).message
    assert sim.code(waiting) == "done"


def test_a_waiting_request_that_pins_made_impossible_fails_too():
    sim = make(num_blocks=10, max_pinned_fraction=0.5, max_running=3)
    running = sim.submit(prompt(17, 1), max_tokens=12)
    waiting = sim.submit(prompt(33, 2), max_tokens=4)
    for _ in range(3):
        sim.round()
    sim.cache.pin("p", pack_tokens(prompt(16, 1)), namespace_of(b"", b""))
    sim.finish_all()
    assert (sim.code(running), sim.code(waiting)) == ("done", ErrorCode.KV_CAPACITY)
