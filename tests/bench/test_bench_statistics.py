"""The arithmetic of paired runs."""

from __future__ import annotations

import math
import os
import random

import pytest

from kvd.bench.machine import Watch, machine, process_tree, resident_bytes, tree_cpu_s
from kvd.bench.measuring import Answer
from kvd.bench.plan import METRICS
from kvd.bench.ratios import median_ratio, percentile, ratio_of


def test_the_interval_is_students_over_the_logarithms():
    ratio = ratio_of([math.exp(each) for each in (0.1, -0.1, 0.3)])
    half = 4.303 * 0.2 / math.sqrt(3)
    assert ratio.mean == pytest.approx(math.exp(0.1))
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(0.1 - half), math.exp(0.1 + half)))
    assert ratio.num_pairs == 3


def test_a_ratio_and_its_inverse_cancel_out_and_one_pair_says_nothing():
    assert ratio_of([0.5, 2.0]).mean == pytest.approx(1.0)
    assert (ratio_of([0.9]).low, ratio_of([0.9]).high) == (0.0, math.inf)
    assert (median_ratio([0.9]).low, median_ratio([0.9]).high) == (0.0, math.inf)


def test_fifteen_pairs_of_two_percent_noise_can_tell_two_percent():
    ratio = ratio_of([1 + 0.02 * (-1) ** number for number in range(15)])
    assert ratio.high - ratio.low < 0.025
    assert ratio.low < 1 < ratio.high


def test_the_median_ignores_one_wild_pair_and_of_few_pairs_the_range_is_shown():
    assert median_ratio([1.0, 1.1, 9.0]).mean == 1.1
    assert (median_ratio([1.0, 1.1, 9.0]).low, median_ratio([1.0, 1.1, 9.0]).high) == (1.0, 9.0)


def test_the_bootstraps_interval_holds_the_truth_about_as_often_as_it_says():
    draw = random.Random(1)
    inside = 0
    for _ in range(60):
        ratio = median_ratio([math.exp(draw.gauss(0.2, 0.1)) for _ in range(12)])
        inside += ratio.low <= math.exp(0.2) <= ratio.high
    assert inside >= 52


def test_the_same_pairs_give_the_same_interval():
    pairs = [1.0, 1.2, 0.9, 1.1, 1.3, 1.05, 0.97]
    assert median_ratio(pairs) == median_ratio(pairs)


def test_percentiles_lie_between_neighbours():
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([0, 10], 99) == pytest.approx(9.9)
    assert percentile([7], 99) == 7
    assert percentile([1.0, math.inf, math.inf], 99) == math.inf
    assert percentile([1.0, 2.0, math.inf], 50) == 2.0


def test_better_is_above_one_for_rates_and_for_times():
    assert METRICS["decode_tokens_per_s"].ratio(30, 20) == 1.5
    assert METRICS["ttft_s"].ratio(2.0, 3.0) == 1.5
    assert METRICS["hit_rate"].ratio(0.5, 0.0) == math.inf
    assert METRICS["hit_rate"].ratio(0.0, 0.5) == 0.0
    assert METRICS["hit_rate"].ratio(0.0, 0.0) == 1.0


def test_an_answers_times():
    answer = Answer(1.0, [1.5, 1.6, 1.8], [1, 1, 2], 2.0, "", 10, 4)
    assert answer.ttft_s == 0.5
    assert answer.gaps_s == pytest.approx([0.1, 0.2])
    assert answer.tokens_within(1.5, 1.8) == 3
    assert Answer(1.0, ended_s=3.0).ttft_s == 2.0


def test_a_piece_weighs_as_many_tokens_as_there_were_more_than_pieces():
    assert Answer(0.0, [1.0, 2.0, 3.0], [1, 1, 1], 3.0, "", 1, 6).tokens_within(1.0, 3.0) == 4


def test_the_machine_and_this_process():
    assert "cores" in machine()
    assert process_tree(os.getpid())[0] == os.getpid()
    assert resident_bytes(os.getpid())["unshared"] > 1 << 20
    assert tree_cpu_s(os.getpid()) > 0


def test_who_used_the_processors():
    with Watch(os.getpid()) as watch:
        sum(range(3_000_000))
    assert watch.found["driver_cpu_s"] > 0
    assert watch.found["wall_s"] > 0
    with Watch(None) as alone:
        pass
    assert alone.found["server_cpu_s"] is None
