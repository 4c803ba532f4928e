"""Beam search through scheduler, cache and fake executor: the sequences and scores of a plain search, whatever else happens to rows and blocks."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from beam_world import FakeModel, World
from plain_beam_search import plain_beam_search

from kvd.cache.tenants import Selection
from kvd.commands import RequestDone
from kvd.executor.fake import EOS_TOKEN_ID
from kvd.types import BeamSearch, Constraint, ErrorCode, SamplingParams, Speculation, pack_tokens

MODELS = {size: FakeModel(size) for size in (2, 4, 16)}


def text(number, length):
    return bytes(random.Random(number).choices(b"abcdefgh ", k=length))


def expected(prompt, beam, *, max_tokens, stop_ids=(EOS_TOKEN_ID,), min_tokens=0, num_choices=1, block_size=4):
    model = MODELS[block_size]
    return plain_beam_search(
        lambda tokens: model.logprobs((*prompt, *tokens)),
        width=beam.width,
        stop_ids=tuple(stop_ids),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        length_penalty=beam.length_penalty,
        early_stopping="never" if beam.early_stopping is None else beam.early_stopping,
        num_returned=num_choices,
    )


def check(world, request_id, prompt, beam, *, block_size=4, **options):
    said = world.said(request_id)
    wanted = expected(prompt, beam, block_size=block_size, **options)
    assert [tokens for tokens, _ in said] == [tokens for tokens, _ in wanted]
    assert [score for _, score in said] == pytest.approx([score for _, score in wanted])


def submit(world, prompt, beam, *, max_tokens, stop_ids=(EOS_TOKEN_ID,), min_tokens=0, num_choices=1, **options):
    return world.submit(
        prompt, beam=beam, max_tokens=max_tokens, stop_token_ids=tuple(stop_ids), min_tokens=min_tokens, num_choices=num_choices, **options
    )


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("early_stopping", [False, True, None])
def test_sequences_and_scores_are_those_of_a_plain_search(width, early_stopping):
    world = World()
    asked = []
    for number, length_penalty in enumerate((0.0, 1.0, 2.0)):
        prompt, beam = text(number, 3 + 5 * number), BeamSearch(width, length_penalty, early_stopping)
        options = {"max_tokens": 10, "stop_ids": (EOS_TOKEN_ID, *b"et"), "num_choices": min(width, 3), "min_tokens": number}
        asked.append((submit(world, prompt, beam, **options), prompt, beam, options))
        world.finish()
    for request_id, prompt, beam, options in asked:
        check(world, request_id, prompt, beam, **options)


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_beams_run_beside_each_other_and_beside_plain_rows(block_size, max_in_flight):
    world = World(block_size=block_size, max_in_flight=max_in_flight, max_tokens_per_step=11)
    asked = []
    for number in range(4):
        prompt, beam = text(number % 2, 9 + number % 2), BeamSearch(2 + number)
        options = {"max_tokens": 12, "num_choices": 2, "block_size": block_size}
        asked.append((submit(world, prompt, beam, max_tokens=12, num_choices=2), prompt, beam, options))
        world.submit(prompt, max_tokens=20)
        world.round()
    world.finish()
    for request_id, prompt, beam, options in asked:
        check(world, request_id, prompt, beam, **options)


def test_beams_are_in_every_step_beside_plain_rows_that_go_a_step_ahead():
    world = World(max_in_flight=2)
    for number in range(3):
        world.submit(text(number, 9), max_tokens=40, stop_token_ids=())
    request_id = submit(world, text(4, 9), BeamSearch(2, early_stopping=False), max_tokens=12, stop_ids=())
    sizes = []
    while request_id not in world.terminal:
        step = world.round()
        if step is not None:
            sizes.append(len(step.started) + len(step.continued.rows))
    assert sizes[1:12] == [5] * 11


def test_nothing_is_told_before_the_end_and_no_credit_is_needed():
    world = World()
    prompt, beam = text(1, 6), BeamSearch(3)
    request_id = submit(world, prompt, beam, max_tokens=8, credit_tokens=0, num_choices=2)
    while request_id not in world.terminal:
        assert not world.told[request_id]
        world.round()
    check(world, request_id, prompt, beam, max_tokens=8, num_choices=2)
    assert not world.scheduler.num_stalled


def test_the_tokens_of_a_beam_have_log_probabilities_where_they_are_asked_for():
    world = World()
    prompt = text(1, 6)
    request_id = submit(world, prompt, BeamSearch(3), max_tokens=8, sampling=SamplingParams(temperature=0.0, num_logprobs=2))
    world.finish()
    context, total = tuple(prompt), 0.0
    for token, entry in world.told[request_id][0]:
        row = MODELS[4].logprobs(context)
        assert entry.token_id == token
        assert entry.logprob == row[token]
        assert [logprob for _, logprob in entry.top] == sorted(row, reverse=True)[:2]
        context, total = (*context, token), total + entry.logprob
    assert world.ends[request_id][0].cumulative_logprob == pytest.approx(total)


def test_a_step_copies_at_most_one_block_a_beam_and_drops_dead_beams_at_once():
    for width in (2, 4, 6):
        world = World(block_size=4)
        submit(world, text(width, 6), BeamSearch(width), max_tokens=40, stop_ids=())
        reordered = 0
        while world.scheduler.has_work():
            step = world.round()
            if step is None:
                continue
            assert len(step.started) + len(step.continued.rows) <= width
            by_row = Counter(copy.row for copy in step.copies)
            assert all(count == 1 for count in by_row.values())
            assert len(step.copies) <= max(0, len(step.started) + len(step.continued.rows) - 1)
            reordered += bool(step.started)
            assert world.scheduler._roster.num_seated <= width
        assert reordered > 5
        counts = world.scheduler.stats()
        assert 0 < counts["beam_blocks_saved"] < counts["beam_blocks"]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_preempted_replanned_and_crowded_beams_say_the_same(seed, max_in_flight):
    """A pool for about one and a half of these requests: beams lose their seats and take them again, together."""
    draw = random.Random(seed)
    world = World(
        num_blocks=draw.randint(30, 40),
        max_in_flight=max_in_flight,
        max_running=draw.randint(6, 9),
        max_tokens_per_step=draw.choice([5, 16]),
    )
    asked = []
    for _ in range(5):
        prompt, beam = (
            text(draw.randrange(2), draw.randint(3, 12)),
            BeamSearch(draw.randint(2, 4), early_stopping=draw.choice([True, False, None])),
        )
        max_tokens = draw.randint(6, 18)
        asked.append((submit(world, prompt, beam, max_tokens=max_tokens, stop_ids=(EOS_TOKEN_ID, *b"e")), prompt, beam, max_tokens))
        asked.append((world.submit(prompt, max_tokens=max_tokens), None, None, None))
        for _ in range(draw.randrange(6)):
            world.round()
        if draw.random() < 0.7:
            seated = [each.request for each in world.scheduler._roster.seated() if not each.is_over]
            if seated:
                world.scheduler._roster.preempt(draw.choice(seated))
    world.finish()
    assert world.scheduler.stats()["preemptions"] > 0
    for request_id, prompt, beam, max_tokens in asked:
        assert isinstance(world.terminal[request_id], RequestDone)
        if beam is not None:
            check(world, request_id, prompt, beam, max_tokens=max_tokens, stop_ids=(EOS_TOKEN_ID, *b"e"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"beam": BeamSearch(17)}, "width is 17: 1 to 16"),
        ({"beam": BeamSearch(0)}, "width is 0"),
        ({"beam": BeamSearch(2), "num_choices": 3}, "3 choices are asked for of 2 beams"),
        ({"beam": BeamSearch(2, float("nan"))}, "length_penalty is nan"),
        ({"beam": BeamSearch(2), "best_of": 2}, "best_of don't go together"),
        ({"beam": BeamSearch(2), "sampling": SamplingParams(temperature=0.5)}, "draws nothing"),
        ({"beam": BeamSearch(2), "sampling": SamplingParams(top_k=5)}, "draws nothing"),
        ({"beam": BeamSearch(2), "sampling": SamplingParams(presence_penalty=1.0)}, "leave the penalties out"),
        ({"beam": BeamSearch(2), "sampling": SamplingParams(logit_bias=((1, 2.0),))}, "leave logit_bias out"),
        ({"beam": BeamSearch(2), "constraint": Constraint("json")}, "a constraint don't go together"),
        ({"beam": BeamSearch(2), "speculation": Speculation("ngram")}, "does not speculate"),
        ({"beam": BeamSearch(2), "speculation": Speculation(num_draft=2)}, "does not speculate"),
        ({"best_of": 17}, "best_of is 17: it must be from n (1) to 16"),
        ({"best_of": 2, "num_choices": 3}, "best_of is 2: it must be from n (3) to 16"),
        ({"best_of": 2, "sampling": SamplingParams(temperature=0.0)}, "all choices would be the same"),
        ({"beam": BeamSearch(16), "max_tokens": 190}, "needs up to"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(options, reason):
    world = World()
    request_id = world.submit(text(1, 6), **{"max_tokens": 5, **options})
    assert reason in world.terminal[request_id].message


def test_an_abort_ends_all_beams_and_tells_the_choices_that_were_asked_for():
    world = World()
    request_id = submit(world, text(1, 6), BeamSearch(4), max_tokens=50, stop_ids=(), num_choices=2)
    for _ in range(7):
        world.round()
    world.take(world.scheduler.finish_choice(request_id, 0))
    assert request_id not in world.terminal
    world.take(world.scheduler.abort(request_id))
    assert [end.reason for end in world.ends[request_id].values()] == ["aborted", "aborted"]
    assert not world.told[request_id]
    world.finish()


def test_a_beam_whose_logits_are_not_finite_fails_its_request_alone():
    prompt = text(1, 6)
    wanted = expected(prompt, BeamSearch(3), max_tokens=12, stop_ids=())
    poison = wanted[0][0][5]
    world = World(poison=poison)
    request_id = submit(world, prompt, BeamSearch(3), max_tokens=12, stop_ids=())
    other = world.submit(b"\x01\x02\x03", max_tokens=3)
    world.finish()
    assert world.terminal[request_id].code == ErrorCode.NONFINITE_LOGITS
    assert isinstance(world.terminal[other], RequestDone) or poison in [token for token, _ in world.told[other][0]]


def test_it_waits_until_there_is_room_for_all_beams():
    world = World(max_running=5)
    first = world.submit(text(1, 5), max_tokens=6)
    second = world.submit(text(2, 5), max_tokens=9)
    beams = submit(world, text(3, 5), BeamSearch(4), max_tokens=5)
    world.round()
    assert world.scheduler.num_waiting == 1
    while first not in world.terminal:
        world.round()
    world.round()
    assert world.scheduler.num_waiting == 0
    world.finish()
    assert all(isinstance(world.terminal[each], RequestDone) for each in (second, beams))


def test_a_forgotten_prompt_leaves_nothing_behind_and_the_search_goes_on():
    world = World()
    prompt = text(1, 8)
    request_id = submit(world, prompt, BeamSearch(3), max_tokens=12)
    for _ in range(6):
        world.round()
    world.take(world.scheduler.forget(Selection("", b"", pack_tokens(list(prompt[:4]))))[1])
    world.scheduler._roster.preempt(next(iter(world.scheduler._requests.values())))
    world.finish()
    check(world, request_id, prompt, BeamSearch(3), max_tokens=12)
    assert world.cache.num_cached == 0


def test_the_most_that_a_pool_holds_is_searched_in_it():
    """The request needs every block at its end, preempted on the way."""
    beam = BeamSearch(3)
    world = World(num_blocks=1 + 3 * 4, block_size=4)
    request_id = submit(world, text(1, 4), beam, max_tokens=17, stop_ids=())
    for _ in range(9):
        world.round()
    world.scheduler._roster.preempt(next(iter(world.scheduler._requests.values())))
    world.finish()
    check(world, request_id, text(1, 4), beam, max_tokens=17, stop_ids=())
