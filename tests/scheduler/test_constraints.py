"""Constrained requests in the scheduler: what they say is what a lone runner says under the same masks, whatever happens meanwhile."""

from __future__ import annotations

import gc
import weakref

import pytest
from constraint_world import GREEDY, NUM_WORDS, ConstraintWorld, WordState, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.commands import RequestFailed
from kvd.executor.fake import EOS_TOKEN_ID
from kvd.types import ErrorCode, SamplingParams

WORDS = ("yes", "yes, indeed", "no", "not at all", "perhaps")
LONG = ("a" * 30, "a" * 12 + "b" * 18, "b" * 30)
WARM = SamplingParams(temperature=1.0, seed=7)


def prompt(num_tokens, salt=0):
    return [97 + (7 * index + salt) % 20 for index in range(num_tokens)]


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("late", [False, True])
def test_a_choice_is_one_of_the_words_and_ends_with_stop(sampling, max_in_flight, speculative, late):
    world = ConstraintWorld(max_in_flight=max_in_flight, speculative=speculative, late=late)
    requests = {world.submit(prompt(5 + salt, salt), WORDS, sampling=sampling): prompt(5 + salt, salt) for salt in range(6)}
    world.finish_all()
    for request, text in requests.items():
        assert world.heard(request) == expected(text, WORDS, max_tokens=20, sampling=sampling)
        ids, reason = world.heard(request)
        assert bytes(ids[:-1] if ids[-1] == EOS_TOKEN_ID else ids).decode() in WORDS
        assert reason == "stop"


def test_plain_rows_beside_it_say_what_they_say_alone():
    lone = ConstraintWorld()
    alone = lone.submit(prompt(9), max_tokens=15)
    lone.finish_all()
    world = ConstraintWorld(max_in_flight=2)
    plain = world.submit(prompt(9), max_tokens=15)
    world.submit(prompt(5), LONG, max_tokens=30)
    world.finish_all()
    assert world.heard(plain) == lone.heard(alone)


@pytest.mark.parametrize("late", [False, True])
def test_it_is_in_every_step_beside_plain_rows_that_go_a_step_ahead(late):
    world = ConstraintWorld(max_in_flight=2, speculative=False, late=late)
    for salt in range(3):
        world.submit(prompt(5, salt), max_tokens=40, stop=())
    request = world.submit(prompt(5, 9), LONG, max_tokens=12)
    steps = []
    while not world.heard(request)[1]:
        steps.append(world.round())
    planned = [step for step in steps if step is not None]
    planned = planned[next(number for number, step in enumerate(planned) if step.masks is not None or step.late_masks is not None) :]
    assert all(step.late_masks is not None if late and number else step.masks is not None for number, step in enumerate(planned[:12]))
    assert all(len(step.continued.rows) == 4 for step in planned[1:12])


def test_what_ends_while_its_next_masks_are_awaited_gets_none_and_others_get_theirs():
    world = ConstraintWorld(max_in_flight=2, speculative=False)
    requests = [world.submit(prompt(5, salt), words, max_tokens=30) for salt, words in enumerate([("ab",), LONG, ("abc",)])]
    world.take(world.scheduler.expire())
    world.in_flight.extend(world.scheduler.schedule() for _ in range(2))
    first, late = world.in_flight
    assert first.masks is not None
    assert late.late_masks is not None
    assert world.scheduler.schedule() is None, "its masks are to be told first"
    world.take(world.scheduler.abort(requests[2]))
    world.finish_all()
    assert late.late_masks.wait().rows == late.late_masks.rows
    for salt, words in ((0, ("ab",)), (1, LONG)):
        assert world.heard(requests[salt]) == expected(prompt(5, salt), words, max_tokens=30)


def test_an_executor_that_fails_gets_the_masks_that_it_waits_for():
    world = ConstraintWorld(max_in_flight=2, speculative=False)
    world.submit(prompt(5), LONG, max_tokens=30)
    while not any(step.late_masks is not None for step in world.in_flight):
        world.take(world.scheduler.expire())
        world.in_flight.append(world.scheduler.schedule())
    late = next(step for step in world.in_flight if step.late_masks is not None)
    for step in world.in_flight:
        world.take(world.scheduler.fail_step(step, "it broke"))
    assert set(late.late_masks.wait().words) == {0xFF}
    assert len(late.late_masks.wait().words) == 4 * NUM_WORDS


def test_a_text_that_is_cut_off_ends_with_length():
    world = ConstraintWorld()
    request = world.submit(prompt(5), LONG, max_tokens=4)
    world.finish_all()
    assert world.heard(request) == expected(prompt(5), LONG, max_tokens=4)
    assert world.heard(request)[1] == "length"


def test_the_last_token_that_completes_the_text_is_a_stop_not_a_length():
    world = ConstraintWorld()
    request = world.submit(prompt(5), ("abc",), max_tokens=3)
    world.finish_all()
    assert world.heard(request) == (list(b"abc"), "stop")


def test_choices_go_their_own_ways_from_one_prompt():
    world = ConstraintWorld()
    request = world.submit(prompt(11), WORDS, num_choices=4, sampling=WARM)
    world.finish_all()
    heard = [world.heard(request, choice) for choice in range(4)]
    assert heard == [expected(prompt(11), WORDS, max_tokens=20, sampling=WARM, choice=choice) for choice in range(4)]
    assert len({tuple(ids) for ids, _ in heard}) > 1


def test_a_chunk_in_the_middle_of_a_prompt_needs_no_mask():
    world = ConstraintWorld(max_tokens_per_step=4, speculative=False)
    request = world.submit(prompt(18), WORDS)
    world.finish_all()
    assert world.heard(request) == expected(prompt(18), WORDS, max_tokens=20)
    assert world.compiler.num_masks == len(world.heard(request)[0])


def test_preempted_and_resumed_it_says_the_same():
    world = ConstraintWorld(num_blocks=18, max_tokens_per_step=16, max_in_flight=2)
    requests = [(salt, world.submit(prompt(8, salt), LONG, max_tokens=30, sampling=WARM)) for salt in range(4)]
    world.finish_all()
    for salt, request in requests:
        assert world.heard(request) == expected(prompt(8, salt), LONG, max_tokens=30, sampling=WARM)
    assert world.scheduler.stats()["preemptions"] > 0


def test_what_must_follow_is_drafted_and_says_the_same():
    world = ConstraintWorld()
    words = ("a" * 30, "b" * 30)
    request = world.submit(prompt(5), words, max_tokens=30)
    num_steps = 0
    while world.scheduler.has_work():
        num_steps += world.round() is not None
    assert world.heard(request) == expected(prompt(5), words, max_tokens=30)
    stats = world.scheduler.stats()
    assert stats["accepted_tokens"] == stats["drafted_tokens"] > 20
    assert num_steps < 12


@pytest.mark.parametrize("num_choices", [1, 3])
def test_prompt_lookup_proposes_what_the_constraint_allows(num_choices):
    text = list(b"abcabcabcabcabcabcabcabcabc")
    words = tuple("abc" * number + end for number in range(4, 9) for end in ("x", "y"))
    world = ConstraintWorld(max_model_len=128)
    request = world.submit(text, words, max_tokens=40, num_choices=num_choices, sampling=WARM)
    world.finish_all()
    for choice in range(num_choices):
        assert world.heard(request, choice) == expected(text, words, max_tokens=40, sampling=WARM, choice=choice)
    assert world.scheduler.stats()["drafted_tokens"] > 0


def test_without_credit_it_waits_and_goes_on():
    world = ConstraintWorld()
    request = world.submit(prompt(5), LONG, max_tokens=30, credit=3)
    for _ in range(10):
        world.round()
    assert len(world.heard(request)[0]) == 3
    world.take(world.scheduler.grant(request, 100))
    world.finish_all()
    assert world.heard(request) == expected(prompt(5), LONG, max_tokens=30)


# ------------------------------------------------------------------------------------------------ ends and contradictions


@pytest.mark.parametrize("min_tokens", [2, 3, 5, 20])
def test_the_constraint_is_stronger_than_min_tokens(min_tokens):
    world = ConstraintWorld()
    request = world.submit(prompt(5), ("yes", "yes, indeed"), min_tokens=min_tokens)
    world.finish_all()
    assert world.heard(request) == expected(prompt(5), ("yes", "yes, indeed"), max_tokens=20, min_tokens=min_tokens)
    text = bytes(token_id for token_id in world.heard(request)[0] if token_id != EOS_TOKEN_ID).decode()
    assert text in ("yes", "yes, indeed")
    assert min_tokens <= 3 or text == "yes, indeed"


def test_an_end_that_is_ignored_ends_the_text_all_the_same():
    world = ConstraintWorld()
    request = world.submit(prompt(5), WORDS, stop=())
    world.finish_all()
    ids, reason = world.heard(request)
    assert reason == "stop"
    assert bytes(token_id for token_id in ids if token_id != EOS_TOKEN_ID).decode() in WORDS


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_a_choice_that_the_constraint_ends_before_min_tokens_leaves_the_others_alone(late, max_in_flight):
    words, stop, sampling = ("a", "ab", "c" * 12), (EOS_TOKEN_ID, ord("b")), SamplingParams(temperature=1.0, seed=0)
    world = ConstraintWorld(max_in_flight=max_in_flight, late=late)
    request = world.submit(prompt(9), words, num_choices=4, sampling=sampling, stop=stop, min_tokens=4)
    world.finish_all()
    heard = [world.heard(request, choice) for choice in range(4)]
    limits = {"max_tokens": 20, "min_tokens": 4, "stop": stop}
    assert heard == [expected(prompt(9), words, sampling=sampling, choice=choice, **limits) for choice in range(4)]
    assert (list(b"a"), "stop") in heard
    assert (list(b"c" * 12), "stop") in heard


def test_an_empty_text_alone_and_min_tokens_contradict_each_other():
    world = ConstraintWorld()
    request = world.submit(prompt(5), ("",), min_tokens=1, num_choices=3)
    world.finish_all()
    assert world.ends[request].code == ErrorCode.BAD_REQUEST
    assert "min_tokens" in world.ends[request].message


def test_lists_that_leave_no_token_are_named():
    world = ConstraintWorld()
    sampling = SamplingParams(temperature=0.0, banned_token_ids=tuple(b"yp"), allowed_token_ids=tuple(b"not"))
    contradiction = world.submit(prompt(5), ("yes", "perhaps"), sampling=sampling)
    narrowed = world.submit(prompt(5), WORDS, sampling=sampling)
    world.finish_all()
    assert world.ends[contradiction].code == ErrorCode.BAD_REQUEST
    assert "constraint" in world.ends[contradiction].message
    assert world.heard(narrowed) == (list(b"no"), "stop") or bytes(world.heard(narrowed)[0]).startswith(b"not")


def test_a_constraint_that_gives_up_fails_its_request_alone_and_is_compiled_afresh():
    world = ConstraintWorld()
    request = world.submit(prompt(5), ("abc…def",), max_tokens=20)
    other = world.submit(prompt(6), WORDS)
    world.finish_all()
    assert world.ends[request].code == ErrorCode.BAD_REQUEST
    assert "out of fuel" in world.ends[request].message
    assert [constraint.source for constraint in world.compiler.forgotten] == [("abc…def",)]
    assert world.heard(other) == expected(prompt(6), WORDS, max_tokens=20)


def test_one_that_a_sampled_token_makes_too_complex_is_told_so_too():
    world = ConstraintWorld(speculative=False)
    request = world.submit(prompt(5), ("abc‰def",), max_tokens=20)
    world.finish_all()
    assert world.ends[request].code == ErrorCode.BAD_REQUEST
    assert "too complex" in world.ends[request].message
    assert "too many items" in world.ends[request].message
    assert [constraint.source for constraint in world.compiler.forgotten] == [("abc‰def",)]


def test_a_token_that_the_mask_forbade_is_a_fault_of_the_daemon(monkeypatch):
    monkeypatch.setattr(WordState, "mask", lambda _: b"\xff" * (4 * NUM_WORDS))
    world = ConstraintWorld(speculative=False)
    request = world.submit(prompt(5), ("‰",), max_tokens=20)
    world.finish_all()
    assert world.ends[request].code == ErrorCode.INTERNAL
    assert "forbids" in world.ends[request].message
    assert not world.compiler.forgotten


@pytest.mark.parametrize("where", ["stalled", "queued", "preempted", "in a step"])
def test_a_constraint_that_is_given_up_leaves_memory_wherever_its_requests_are(where):
    world = ConstraintWorld(max_running=1 if where == "queued" else 8, num_blocks=14 if where == "preempted" else 64, max_in_flight=2)
    requests = [world.submit(prompt(8, salt), LONG, max_tokens=30, credit=3 if where == "stalled" else 1000) for salt in range(4)]
    roster = world.scheduler._roster
    is_there = {
        "stalled": lambda: roster.stalled,
        "queued": lambda: len(roster.queue) and roster.running,
        "preempted": lambda: roster.num_preemptions,
        "in a step": lambda: world.in_flight,
    }[where]
    for _ in range(20):
        if is_there():
            break
        world.round()
    assert is_there()
    running = {sequence.request for sequence in roster.running}
    there = {"stalled": roster.stalled, "in a step": running}.get(where, set(world.scheduler._requests.values()) - running)
    chosen, grammar = next((request.request_id, request.constraint) for request in there)
    del running, there
    grammar.problem = "they hold more than 512 MiB"
    world.take(world.scheduler.expire())
    assert chosen not in world.ends, "nobody is asked as long as the compiler gives none up"
    world.compiler.num_outgrown += 1
    gc.disable()
    try:
        reference = weakref.ref(grammar)
        del grammar
        world.take(world.scheduler.expire())
        assert isinstance(world.ends[chosen], RequestFailed)
        assert world.ends[chosen].code == ErrorCode.BAD_REQUEST
        assert "they hold more than 512 MiB" in world.ends[chosen].message
        if where != "in a step":
            assert reference() is None
    finally:
        gc.enable()
    assert len(world.compiler.forgotten) == 1
    for request in requests:
        world.take(world.scheduler.grant(request, 100))
    world.finish_all()
    assert reference() is None
    for salt, request in enumerate(requests):
        if request != chosen:
            assert world.heard(request) == expected(prompt(8, salt), LONG, max_tokens=30)


@pytest.mark.parametrize("words", [WORDS, ("abc…def",)], ids=["matched", "given up"])
def test_what_a_constraint_holds_is_gone_with_its_request_and_waits_for_no_collector(words):
    world = ConstraintWorld(max_in_flight=2)
    gc.disable()
    try:
        world.submit(prompt(5), words, num_choices=2, sampling=WARM)
        (request,) = world.scheduler._requests.values()
        grammar = weakref.ref(request.constraint)
        states = [weakref.ref(sequence.constraint) for sequence in request.sequences]
        del request
        world.finish_all()
        assert grammar() is None
        assert not any(state() for state in states)
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------------- while it compiles


def test_at_a_shutdown_those_fail_whose_constraints_are_not_there():
    world = ConstraintWorld()
    begun = world.submit(prompt(5), WORDS)
    world.compiler.holds = True
    waiting, gone = world.submit(prompt(6), WORDS), world.submit(prompt(7), WORDS)
    world.take(world.scheduler.abort(gone))
    world.take(world.scheduler.end_compiling())
    assert world.ends[waiting].code == ErrorCode.DRAINING
    assert not world.compiler.tickets
    world.finish_all()
    assert world.heard(begun) == expected(prompt(5), WORDS, max_tokens=20)


def test_a_request_that_waits_for_its_constraint_holds_nothing_and_nobody():
    world = ConstraintWorld(max_running=1)
    world.compiler.holds = True
    waiting = world.submit(prompt(8), WORDS)
    plain = world.submit(prompt(6), max_tokens=5)
    for _ in range(12):
        world.round()
    assert plain in world.ends
    assert waiting not in world.ends
    assert (world.cache.num_tables, world.scheduler.num_running, world.scheduler.num_waiting) == (0, 0, 1)
    assert world.scheduler.has_work()
    assert world.scheduler.stats()["compiling"] == 1
    world.compiler.finish()
    world.finish_all()
    assert world.heard(waiting) == expected(prompt(8), WORDS, max_tokens=20)


def test_a_refusal_ends_the_request_with_its_reason():
    world = ConstraintWorld()
    request = world.submit(prompt(8), ())
    assert (world.ends[request].code, world.ends[request].message) == (ErrorCode.BAD_REQUEST, "no words")
    world.compiler.holds = True
    later = world.submit(prompt(8), ())
    assert later not in world.ends
    world.compiler.finish()
    world.round()
    assert world.ends[later].code == ErrorCode.BAD_REQUEST
    assert not world.scheduler.has_work()


def test_too_many_that_wait_are_told_to_come_again():
    world = ConstraintWorld()
    world.compiler.is_full = True
    request = world.submit(prompt(8), WORDS)
    assert world.ends[request].code == ErrorCode.OVERLOADED
    assert world.ends[request].retry_after_s > 0


def test_a_daemon_without_constraints_says_so():
    world = ConstraintWorld(constraints=False)
    request = world.submit(prompt(8), WORDS)
    assert world.ends[request].code == ErrorCode.BAD_REQUEST
    assert "grammar.constraints" in world.ends[request].message


def test_those_that_wait_count_as_waiting():
    world = ConstraintWorld(max_waiting=2, max_running=3)
    world.compiler.holds = True
    waiting = [world.submit(prompt(8, salt), WORDS) for salt in range(5)]
    assert not world.ends.keys() & set(waiting), "three of them for the free places"
    refused = world.submit(prompt(8), WORDS)
    assert world.ends[refused].code == ErrorCode.OVERLOADED
    world.compiler.finish()
    world.finish_all()


def test_those_that_wait_count_for_as_many_places_as_they_have_choices():
    world = ConstraintWorld(max_waiting=2, max_running=4)
    world.compiler.holds = True
    ids = [world.submit(prompt(8, salt), WORDS, num_choices=4) for salt in range(4)]
    assert [each for each in ids if each in world.ends] == ids[3:], "one for the places, two to wait"
    world.compiler.finish()
    world.finish_all()


@pytest.mark.parametrize("how", ["abort", "abort_all", "fail_all", "deadline", "queue_timeout"])
def test_it_can_end_while_its_constraint_is_compiled(how):
    world = ConstraintWorld()
    world.compiler.holds = True
    request = world.submit(prompt(8), WORDS, num_choices=2, **({f"{how}_s": 5.0} if how in ("deadline", "queue_timeout") else {}))
    world.round()
    if how == "abort":
        world.take(world.scheduler.abort(request))
        assert {world.reasons[request, choice] for choice in range(2)} == {"aborted"}
    elif how == "abort_all":
        world.take(world.scheduler.abort_all())
    elif how == "fail_all":
        world.take(world.scheduler.fail_all(ErrorCode.DRAINING, "enough"))
    else:
        world.clock.now_s = 6.0
        world.round()
        assert isinstance(world.ends[request], RequestFailed)
    assert request in world.ends
    world.compiler.finish()
    world.finish_all()


def test_it_stalls_when_its_constraint_is_there_and_its_credit_is_not():
    world = ConstraintWorld()
    world.compiler.holds = True
    request = world.submit(prompt(8), WORDS, credit=0)
    world.round()
    assert world.scheduler.num_stalled == 0
    world.compiler.finish()
    world.round()
    assert world.scheduler.num_stalled == 1
    world.take(world.scheduler.grant(request, 100))
    world.finish_all()
    assert world.heard(request) == expected(prompt(8), WORDS, max_tokens=20)


def test_credit_that_comes_while_it_compiles_counts():
    world = ConstraintWorld()
    world.compiler.holds = True
    request = world.submit(prompt(8), WORDS, credit=0)
    world.take(world.scheduler.grant(request, 100))
    world.compiler.finish()
    world.finish_all()
    assert world.heard(request) == expected(prompt(8), WORDS, max_tokens=20)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"), st.integers(1, 20), st.sampled_from([None, WORDS, LONG, ("abc…d",), ()]), st.integers(1, 3), st.booleans()
        ),
        st.tuples(st.just("round"), st.integers(1, 6)),
        st.tuples(st.just("hold"), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("grant"), st.integers(0, 30)),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(ACTIONS, st.integers(1, 3), st.sampled_from([16, 64]), st.booleans(), st.booleans())
def test_whatever_happens_every_text_is_what_it_is_alone(actions, max_in_flight, num_blocks, speculative, late):
    world = ConstraintWorld(
        num_blocks=num_blocks,
        max_in_flight=max_in_flight,
        speculative=speculative,
        late=late,
        max_tokens_per_step=12,
        max_model_len=44,
        max_running=5,
    )
    requests, aborted = [], set()
    for action, *args in actions:
        if action == "submit":
            num_tokens, words, num_choices, scarce = args
            request = world.submit(
                prompt(num_tokens, num_tokens), words, num_choices=num_choices, sampling=WARM, credit=2 if scarce else 1000
            )
            requests.append((request, num_tokens, words, num_choices))
        elif action == "round":
            for _ in range(args[0]):
                world.round()
        elif action == "hold":
            world.compiler.holds = args[0]
            if not args[0]:
                world.compiler.finish()
        elif requests and action == "abort":
            request = requests[args[0] % len(requests)][0]
            aborted.add(request)
            world.take(world.scheduler.abort(request))
        elif requests:
            world.take(world.scheduler.grant(requests[args[0] % len(requests)][0], 5))
    world.compiler.finish()
    for request, *_ in requests:
        world.take(world.scheduler.grant(request, 1000))
    world.finish_all()
    for request, num_tokens, words, num_choices in requests:
        assert request in world.ends
        if not words or request in aborted or isinstance(world.ends[request], RequestFailed):
            continue
        for choice in range(num_choices):
            alone = expected(prompt(num_tokens, num_tokens), words, max_tokens=20, sampling=WARM, choice=choice)
            assert world.heard(request, choice) == alone
