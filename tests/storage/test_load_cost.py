"""When reading beats computing, by what was measured."""

from __future__ import annotations

import pytest

from kvd.storage.load_cost import LoadCost

BLOCK = 1000


def cost(**options):
    return LoadCost(BLOCK, 16, **({"always": False} | options))


def test_what_was_not_measured_is_tried():
    assert cost().num_worth_loading(5, 0) == 5
    known = cost()
    known.note_load(100 * BLOCK, 1000.0)
    assert known.num_worth_loading(5, 0) == 5
    known.note_prefill(160, 1.0)
    assert known.num_worth_loading(5, 0) == 0


def test_a_rate_and_a_latency_are_found_from_loads_of_different_sizes():
    measured = cost()
    for num_blocks in (1, 10, 50, 3, 100, 20):
        measured.note_load(num_blocks * BLOCK, 0.2 + num_blocks * 0.01)
    assert measured.seconds_per_byte == pytest.approx(0.01 / BLOCK)
    assert measured.latency_s == pytest.approx(0.2)


def test_a_latency_makes_a_short_load_slower_and_a_long_one_quicker_than_computing():
    measured = cost()
    for num_blocks in (1, 100):
        measured.note_load(num_blocks * BLOCK, 0.2 + num_blocks * 0.001)
    measured.note_prefill(1600, 1.0)  # ten milliseconds a block
    assert [measured.num_worth_loading(count, 0) for count in (1, 22, 23, 100)] == [0, 0, 23, 100]
    assert measured.num_worth_loading(100, 800) == 0, "others are read first"
    assert measured.num_worth_loading(100, 600) == 100


def test_what_the_start_has_read_is_the_first_measurement():
    measured = cost()
    measured.note_rehydration(1000, 1.0)
    assert measured.seconds_per_byte is None, "too little to say anything"
    measured.note_rehydration(10 << 20, 2.0)
    assert measured.seconds_per_byte == pytest.approx(2.0 / (10 << 20))
    assert measured.latency_s == 0.0


def test_loads_of_one_size_give_a_rate_without_a_latency():
    measured = cost()
    for _ in range(5):
        measured.note_load(20 * BLOCK, 0.4)
    assert measured.seconds_per_byte * 20 * BLOCK == pytest.approx(0.4)
    assert measured.latency_s == pytest.approx(0.0)


def test_noise_that_makes_no_sense_as_a_line_is_averaged():
    measured = cost()
    measured.note_load(10 * BLOCK, 1.0)
    measured.note_load(100 * BLOCK, 0.5)
    assert measured.seconds_per_byte > 0
    assert measured.latency_s >= 0


def test_the_latest_loads_weigh_most():
    measured = cost()
    for seconds in (10.0,) * 20 + (0.1,) * 60:
        measured.note_load(20 * BLOCK, seconds)
    assert measured.seconds_per_byte * 20 * BLOCK < 0.15


def test_the_prefill_rate_weighs_steps_by_their_tokens():
    measured = cost()
    measured.note_prefill(512, 0.1)
    for _ in range(20):
        measured.note_prefill(3, 0.05)  # the rest of a hit: the step's fixed cost
    assert measured.prefill_tokens_per_s == pytest.approx(5120)
    for _ in range(30):
        measured.note_prefill(512, 0.2)
    assert measured.prefill_tokens_per_s == pytest.approx(2560, rel=0.05)


def test_always_is_always():
    measured = cost(always=True)
    measured.note_load(BLOCK, 1e6)
    measured.note_prefill(1 << 20, 1e-3)
    assert measured.num_worth_loading(7, 1000) == 7
