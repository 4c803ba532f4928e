"""How many may wait: as many as there are free places for, and ``max_waiting`` more."""

from simulation import Simulation


def make(**options):
    defaults = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "max_tokens_per_step": 32, "max_running": 8, "max_waiting": 16}
    return Simulation(**(defaults | options))


def prompt(num_tokens, salt=0):
    return [(7 * index + salt) % 2 if index > 3 else (salt >> index) & 1 for index in range(num_tokens)]


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
