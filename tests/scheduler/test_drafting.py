"""Drafts in the scheduler: nothing is overdrawn, nothing wrong is remembered, and whoever does not gain by drafting stops."""

from __future__ import annotations

import itertools

import pytest
from constraint_world import ConstraintWorld
from simulation import Simulation

from kvd.commands import Submit
from kvd.config import SpeculativeConfig
from kvd.types import BeamSearch, Constraint, SamplingParams, Speculation, pack_tokens

CONFIG = SpeculativeConfig(speculation="auto", num_draft=4, ngram_min=2, ngram_max=6)


class Timed(Simulation):
    """Steps take what ``seconds_of(positions)`` says; drafts cost what they cost."""

    def __init__(self, seconds_of=lambda positions: 1.0, **options):
        options = {"num_blocks": 200, "max_model_len": 200, "max_tokens_per_step": 64, "max_running": 40, "max_choices": 8, **options}
        super().__init__(**{"speculative": CONFIG, **options})
        self.seconds_of = seconds_of
        self.steps = []

    def collect(self):
        if self.in_flight:
            step = self.in_flight[0][0]
            positions = sum(started.num_tokens for started in step.started) + sum(step.continued.num_tokens)
            self.scheduler.note_step_time(step, self.seconds_of(positions))
        super().collect()

    def submit_step(self):
        step = super().submit_step()
        if step is not None:
            self.steps.append(step)
        return step

    def run(self, max_rounds=400):
        for _ in range(max_rounds):
            if not self.checker.open():
                break
            self.round()
            self.check()
        assert not self.checker.open()

    @property
    def drafted(self):
        stats = self.scheduler.stats()
        return stats["drafted_tokens"], stats["accepted_tokens"]


PROMPT = [0, 1, 1, 0, 1, 0, 0, 1] * 2


def test_what_is_said_is_the_same_and_takes_fewer_steps_where_drafts_are_right():
    def run(mode, **options):
        sim = Timed(speculative=SpeculativeConfig(speculation=mode, num_draft=4, ngram_min=2, ngram_max=6), vocab=1, **options)
        request_id = sim.submit([0] * 10, max_tokens=60)
        sim.run()
        return sim, sim.terminal(request_id).usage

    plain, plain_usage = run("off")
    for mode, has_model in (("auto", False), ("ngram", False), ("auto", True), ("draft", True)):
        sim, usage = run(mode, has_draft_model=has_model)
        assert len(sim.steps) < 0.6 * len(plain.steps)
        assert usage.accepted_tokens == usage.drafted_tokens == sim.drafted[0] > 30
    assert (plain_usage.drafted_tokens, plain_usage.accepted_tokens) == (0, 0)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("has_model", [False, True])
def test_choices_draft_each_for_itself(max_in_flight, has_model):
    sim = Timed(max_in_flight=max_in_flight, has_draft_model=has_model)
    request_id = sim.submit(PROMPT, num_choices=4, max_tokens=40)
    sim.run()
    usage = sim.terminal(request_id).usage
    assert 0 < usage.accepted_tokens < usage.drafted_tokens == sim.executor.num_drafted
    drafting = {row for step in sim.steps for row, count in zip(step.continued.rows, step.continued.num_draft, strict=False) if count}
    assert len(drafting) == 4


def test_credit_is_never_overdrawn_by_drafts_and_what_was_not_accepted_comes_back():
    sim = Timed(vocab=2)
    request_id = sim.submit(PROMPT, num_choices=2, max_tokens=40, credit_tokens=3)
    granted = 3
    for _ in range(300):
        if not sim.checker.open():
            break
        sim.round()
        sim.check()
        assert sum(sim.heard(request_id)) <= granted + 1  # a request with several choices may exceed its credit by one for each further
        if sim.scheduler.num_stalled:
            sim.grant(request_id, 5)
            granted += 5
    assert sum(sim.heard(request_id)) == 80


def test_a_stop_id_among_accepted_tokens_ends_the_choice_there():
    for stop in (0, 1):
        sim = Timed()
        ids = [
            sim.submit([*PROMPT, 0, 1][: length or None], max_tokens=30, stop_token_ids=(stop,), min_tokens=9) for length in (0, 5, 8, 11)
        ]
        sim.run()  # the checker compares every token, and the reason
        assert all(sim.code(request_id) == "done" for request_id in ids)


def test_lengths_are_kept_to_the_token():
    for max_tokens in range(1, 12):
        sim = Timed(vocab=1, max_model_len=30)
        request_id = sim.submit([0] * 20, max_tokens=max_tokens)
        sim.run()
        assert sim.heard(request_id) == [min(max_tokens, 10)]


def test_the_step_budget_holds_for_drafts():
    sim = Timed(max_tokens_per_step=6, vocab=1)
    for _ in range(3):
        sim.submit([0] * 12, max_tokens=30)
    sim.run()  # the checker looks at the largest step
    assert sim.drafted[0] > 0
    assert sim.executor.largest_step <= 6


def test_drafts_take_nobodys_blocks():
    sim = Timed(num_blocks=31, vocab=1, max_model_len=100)
    ids = [sim.submit([0] * 4, max_tokens=24), sim.submit([0] * 5, max_tokens=24)]
    sim.run()
    assert sim.scheduler.stats()["preemptions"] == 0
    assert [sim.code(request_id) for request_id in ids] == ["done", "done"]


def test_preempted_requests_go_on_drafting():
    sim = Timed(num_blocks=24, max_model_len=40, max_in_flight=2)
    ids = [sim.submit(PROMPT[: 10 + length], max_tokens=20) for length in range(4)]
    sim.run()
    assert sim.scheduler.stats()["preemptions"] > 0
    assert sim.drafted[0] > 0
    assert {sim.code(request_id) for request_id in ids} == {"done"}


def test_what_was_drafted_and_not_accepted_never_enters_the_tree():
    """``Simulation.hear_cache`` compares each stored block with what the executor holds from then on; here with what its tokens must give."""
    sim = Timed(has_draft_model=True)
    request_id = sim.submit(PROMPT, max_tokens=60)
    sim.run()
    assert sim.drafted[1] < sim.drafted[0]
    again = sim.submit([*PROMPT, *[said[0] for said in sim.checker.requests[request_id].says[0]]][:-1], max_tokens=4)
    sim.run()
    assert sim.terminal(again).usage.cached_tokens >= 72


# ------------------------------------------------------------------------------------------ adaptation


def test_drafting_stops_where_positions_cost_and_others_run():
    """Every position costs the same: a draft pays only where it is nearly always right; with random tokens it is not."""
    sim = Timed(seconds_of=lambda positions: positions, has_draft_model=True)
    request_id = sim.submit(PROMPT, max_tokens=150)
    sim.run()
    drafted = sim.terminal(request_id).usage.drafted_tokens
    free = Timed(has_draft_model=True)
    free_id = free.submit(PROMPT, max_tokens=150)
    free.run()
    assert drafted < 0.3 * free.terminal(free_id).usage.drafted_tokens


def test_who_drafts_is_in_every_step_beside_others_who_go_a_step_ahead():
    sim = Timed(vocab=1, max_in_flight=2)
    drafting = sim.submit([0] * 12, max_tokens=60, speculation=Speculation("ngram"))
    plain = [sim.submit([0] * (3 + number), max_tokens=90, speculation=Speculation("off")) for number in range(3)]
    sim.run()
    assert sim.terminal(drafting).usage.accepted_tokens > 20
    drafts = [number for number, step in enumerate(sim.steps) if step.continued.num_draft]
    assert len(drafts) > 8
    assert all(len(step.continued.rows) == 4 for step in sim.steps[drafts[0] : drafts[-1] + 1])
    assert {sim.code(request_id) for request_id in plain} == {"done"}


def test_where_nobody_may_draft_nobody_is_looked_at():
    sim = Timed(max_in_flight=2)
    for number in range(4):
        sim.submit(PROMPT[number:], max_tokens=30, speculation=Speculation("off"))
    sim.round()
    running = sim.scheduler._roster.running
    sim.run()
    assert all(sequence.drafter is None for sequence in running)
    drafting = sim.submit(PROMPT, max_tokens=30)
    sim.run()
    assert sim.terminal(drafting).usage.drafted_tokens > 0
    assert sim.scheduler._endings.num_speculating == 0


def on_two_cores(positions):
    """Milliseconds of a step of a small quantised model; the products' time grows with the positions nearly from the first on."""
    return 6.6 + 0.85 * (positions - 1) if positions <= 8 else 12.5 + 0.95 * (positions - 8)


def in_tiles(positions):
    return 10.0 * -(-positions // 8)


@pytest.mark.parametrize("vocab", [1, 2])
@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize("seconds_of", [on_two_cores, in_tiles, lambda _: 10.0])
def test_what_drafting_costs_while_it_is_found_out_is_little_and_it_pays_where_it_can(seconds_of, num_streams, vocab):
    def seconds(mode):
        sim = Timed(
            seconds_of=seconds_of,
            vocab=vocab,
            max_in_flight=2,
            num_blocks=2000,
            max_model_len=400,
            speculative=SpeculativeConfig(speculation=mode),
        )
        for number in range(num_streams):
            sim.submit([(token + number) % vocab for token in PROMPT], max_tokens=200)
        sim.run()
        positions = [sum(started.num_tokens for started in step.started) + sum(step.continued.num_tokens) for step in sim.steps]
        return sum(map(seconds_of, positions))

    faster = seconds("off") / seconds("auto")
    assert faster > 0.94
    if vocab == 1 and num_streams == 1:
        assert faster > 3
    if seconds_of(16) == seconds_of(1):
        assert faster > 1.25  # further positions are free


def test_who_may_draft_less_than_pays_holds_nobody_up():
    """Further positions cost half of a step, however many: eight drafts would pay, one doesn't."""
    sim = Timed(vocab=1, max_in_flight=2, seconds_of=lambda positions: 10.0 if positions <= 4 else 15.0)
    sim.submit([0] * 12, max_tokens=120, speculation=Speculation("auto", 1))
    for number in range(3):
        sim.submit([0] * (3 + number), max_tokens=150, speculation=Speculation("off"))
    for _ in range(40):
        sim.round()
    rounds = [sim.round() for _ in range(60)]
    assert None not in rounds, "the step behind the one in flight waits for it"


def test_others_are_not_held_up_for_a_draft_that_brings_no_more_than_they_would():
    """Eight rows bring 8 tokens in 8 seconds; a draft that is right half the time would bring half a token in one more."""
    sim = Timed(seconds_of=lambda positions: positions, vocab=2, max_in_flight=2)
    for number in range(8):
        sim.submit(PROMPT[number:], max_tokens=150)
    sim.run()
    drafts = [number for number, step in enumerate(sim.steps) if step.continued.num_draft]
    assert len([number for number in drafts if number > 40]) < 0.05 * len(sim.steps)


def test_a_sequence_that_stops_drafting_goes_a_step_ahead_again():
    sim = Timed(seconds_of=lambda positions: positions, max_in_flight=2)
    sim.submit(PROMPT, max_tokens=150)
    sim.run()
    last = sim.steps[-20:]
    assert all(not step.continued.num_draft and not step.continued.given_ids for step in last)
    (sequence,) = [None] if not sim.scheduler._roster.running else sim.scheduler._roster.running
    assert sequence is None


def test_a_draft_model_that_did_not_pay_is_asked_again_but_rarely():
    sim = Timed(
        seconds_of=lambda positions: 0.65 + 0.35 * positions, has_draft_model=True, speculative=SpeculativeConfig(speculation="draft")
    )
    sim.submit(PROMPT, max_tokens=180)
    sim.run()
    drafting = [at for at, step in enumerate(sim.steps) if step.continued.num_draft]
    gaps = [after - before for before, after in itertools.pairwise(drafting)]
    assert max(gaps) > 16
    assert drafting[-1] > 40


def test_nobody_looks_where_many_run():
    sim = Timed(vocab=1, num_blocks=900, max_waiting=100)
    for length in range(34):
        sim.submit([0] * (3 + length % 3), max_tokens=40)
    crowded = []
    for _ in range(200):
        if not sim.checker.open():
            break
        num_running = len(sim.scheduler._roster.running)
        step = sim.submit_step()
        sim.collect()
        if step is not None and num_running > 32:
            crowded.append(step)
    assert len(crowded) > 5
    assert all(not step.continued.num_draft for step in crowded)
    assert not sim.checker.open()


def test_a_crowd_that_comes_while_drafts_are_in_flight_waits_for_them():
    sim = Timed(vocab=1, num_blocks=900, max_waiting=100, max_in_flight=2)
    first = sim.submit([0] * 10, max_tokens=150)
    while not (sim.in_flight and sim.in_flight[-1][0].continued.num_draft):
        sim.round()
    for length in range(33):
        sim.submit([0] * (1 + length % 3), max_tokens=20)
    sim.run()
    assert sim.code(first) == "done"


def test_rows_whose_numbers_were_not_finite_draft_no_more():
    sim = Timed(vocab=1)
    request_id = sim.submit([0] * 10, max_tokens=60)
    while sim.drafted[0] == 0:
        sim.round()
    sim.executor.fail_row = lambda rows: rows[0]
    sim.round()
    before = sim.drafted[0]
    sim.run()
    assert sim.code(request_id) == "done"
    assert sim.drafted[0] <= before + 4


# ------------------------------------------------------------------------------------------ what can't be


def refusal(**options):
    sim = Timed()
    command = Submit(request_id=bytes(16), token_ids=pack_tokens([1]), sampling=SamplingParams(), max_tokens=3, **options)
    (event,) = sim.scheduler.submit(command)
    assert event.code == "bad_request"
    return event.message


def test_what_does_not_go_together_is_refused_by_name():
    ngram = Speculation("ngram")
    assert "beam search does not speculate" in refusal(speculation=ngram, beam=BeamSearch(2))
    assert "speculative.draft_model" in refusal(speculation=Speculation("draft"))
    with_model = Timed(has_draft_model=True)
    command = Submit(
        request_id=bytes(16),
        token_ids=pack_tokens([1]),
        sampling=SamplingParams(),
        max_tokens=3,
        speculation=Speculation("draft"),
        constraint=Constraint("regex", ("a",)),
    )
    (event,) = with_model.scheduler.submit(command)
    assert "constraint" in event.message


def test_a_request_says_how_it_drafts():
    sim = Timed(vocab=1)
    ids = [sim.submit([0] * 10, max_tokens=30, speculation=wish) for wish in (Speculation("off"), Speculation("ngram", 2), None)]
    sim.run()
    assert sim.terminal(ids[0]).usage.drafted_tokens == 0
    assert sim.terminal(ids[1]).usage.drafted_tokens > 0
    assert max(count for step in sim.steps for count in step.continued.num_draft) == 4


def test_a_number_or_a_way_of_drafts_alone_switches_nothing_on():
    wishes = (Speculation(num_draft=2), Speculation(acceptance="rejection"), Speculation(num_draft=2, acceptance="rejection"))
    for mode, is_on in (("off", False), ("auto", True)):
        for wish in wishes:
            sim = Timed(speculative=SpeculativeConfig(speculation=mode, num_draft=4, ngram_min=2, ngram_max=6), vocab=1)
            request_id = sim.submit([0] * 10, max_tokens=30, speculation=wish)
            sim.run()
            assert (sim.terminal(request_id).usage.drafted_tokens > 0) == is_on
            assert {started.is_rejection for step in sim.steps for started in step.started} == {is_on and wish.acceptance == "rejection"}
            most = max((count for step in sim.steps for count in step.continued.num_draft), default=0)
            assert most == (is_on and (wish.num_draft or 4))


def test_in_a_crowd_not_even_what_is_forced_is_drafted():
    world = ConstraintWorld(num_blocks=1500, max_waiting=100, max_running=40, max_tokens_per_step=200, max_model_len=400)
    forced = world.submit(list(b"say "), ["abcdefghijklmnopqrstuvwxyz" * 12], max_tokens=350)
    while world.scheduler.stats()["drafted_tokens"] == 0:
        world.round()
    for _ in range(35):
        world.submit(list(b"hey"), max_tokens=40, stop=())
    crowded = []
    while forced not in world.ends:
        world.round()
        if len(world.scheduler._roster.running) > 32:
            crowded.append(world.scheduler.stats()["drafted_tokens"])
    assert len(crowded) > 20
    assert crowded[-1] == crowded[1]
    assert world.scheduler.stats()["drafted_tokens"] > crowded[-1]  # again, when the others were gone
