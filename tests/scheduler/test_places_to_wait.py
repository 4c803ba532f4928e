"""How many may wait: as many as there are free places for, and ``max_waiting`` more."""

from roomy_simulation import make, prompt

from kvd.types import ErrorCode


def test_free_places_are_for_those_who_wait():
    """A burst that comes between two steps: nobody of it has a seat yet."""
    sim = make(max_waiting=4)
    ids = [sim.submit(prompt(5, salt), max_tokens=3) for salt in range(14)]
    assert [sim.code(each) for each in ids if sim.terminal(each)] == ["overloaded"] * 2, "eight for the places, four to wait"
    sim.submit_step()
    assert sim.scheduler.num_waiting > 0, "the step's budget is smaller than the burst"
    assert sim.code(sim.submit(prompt(5, 20), max_tokens=3)) == "overloaded", "still as many"
    sim.finish_all()
    assert all(sim.code(each) == "done" for each in ids[:12])


def test_a_request_of_several_choices_takes_several_places():
    sim = make(max_waiting=2, max_choices=4)
    ids = [sim.submit(prompt(5, salt), max_tokens=3, num_choices=4) for salt in range(6)]
    assert [sim.code(each) for each in ids if sim.terminal(each)] == ["overloaded"] * 2, "two run, two wait"
    sim.finish_all()


def test_places_that_lack_blocks_let_no_more_wait_than_there_are_of_them():
    sim = make(num_blocks=6, max_waiting=3, max_running=4)
    runs = sim.submit(prompt(16), max_tokens=6)
    sim.round()
    ids = [sim.submit(prompt(16, 1 + number), max_tokens=6) for number in range(20)]
    sim.round()
    assert sim.scheduler.num_running == 1
    assert sim.scheduler.num_waiting == 3 + 3
    assert [sim.code(each) for each in ids if sim.terminal(each)] == ["overloaded"] * 14
    sim.finish_all()
    assert sim.code(runs) == "done"


def test_a_full_queue_answers_overloaded_with_a_time():
    sim = make(max_waiting=2, max_running=1)
    for salt in range(3):
        sim.submit(prompt(5, salt), max_tokens=3)
        sim.submit_step()
    refused = sim.submit(prompt(5, 9), max_tokens=3)
    failed = sim.terminal(refused)
    assert failed.code == ErrorCode.OVERLOADED
    assert 0 < failed.retry_after_s <= 30
    internal = sim.submit(prompt(5, 9), max_tokens=1, internal=True)
    assert sim.terminal(internal) is None
    sim.finish_all()
