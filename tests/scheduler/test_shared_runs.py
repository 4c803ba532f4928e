"""The tree of shared runs against its definition, over tables that match, fork, grow and end as the cache's do."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulation import Simulation

from kvd.scheduler.shared_runs import RunTree
from kvd.step import NO_SHARED_RUNS


class Tables:
    """Tables of full blocks, as the cache would hand them out: a new one takes over blocks that another has computed, and gets fresh ones after these.

    A *follower* begins with fewer blocks than it takes over, as if the rest were just being computed. ``catch_up`` brings the rest; what a broken one waited
    for will not come, so that it brings nothing and stays a follower.
    """

    def __init__(self, tile_blocks):
        self.tree = RunTree(tile_blocks)
        self.tables = {}
        self.matched = {}
        """Of each follower, how many of its blocks it took over."""
        self.broken = set()
        self.fresh = itertools.count(1000)

    def begin(self, row, source, num_matched, num_own, num_awaited=0):
        if row in self.tables:
            return
        # what a follower has for itself, nobody matches before it has caught up
        matched = self.tables[source][: min(num_matched, self.matched.get(source, num_matched))] if source in self.tables else []
        self.tables[row] = [*matched, *itertools.islice(self.fresh, num_own)]
        if num_awaited:
            self.matched[row] = len(matched)
        self.tree.add(row, self.tables[row], max(0, len(matched) - num_awaited))

    def catch_up(self, break_row=None):
        ready = [row for row in self.matched if row not in self.broken]
        self.broken.update({break_row} & set(ready))
        for row in ready:
            self.tree.remove(row)
        for row in ready:
            self.tree.add(row, self.tables[row], 0 if row in self.broken else self.matched[row])
            if row not in self.broken:
                del self.matched[row]

    def grow(self, row, num_blocks):
        if row in self.tables:
            self.tables[row].extend(itertools.islice(self.fresh, num_blocks))

    def end(self, row):
        self.tree.remove(row)
        self.tables.pop(row, None)
        self.matched.pop(row, None)
        self.broken.discard(row)

    def check(self):
        self.tree.check_invariants({row: (table, len(table)) for row, table in self.tables.items()}, followers=set(self.matched))


rows = st.integers(0, 5)
begins = st.tuples(st.just("begin"), rows, rows, st.integers(0, 12), st.integers(0, 5))
follows = st.tuples(st.just("begin"), rows, rows, st.integers(1, 12), st.integers(0, 2), st.integers(1, 12))
catches_up = st.tuples(st.just("catch_up"), st.one_of(st.none(), rows))
grows = st.tuples(st.just("grow"), rows, st.integers(1, 5))
ends = st.tuples(st.just("end"), rows)


@settings(max_examples=150, deadline=None)
@given(tile_blocks=st.sampled_from([1, 1, 2, 4]), what=st.lists(st.one_of(begins, begins, follows, catches_up, grows, ends), max_size=40))
@example(tile_blocks=1, what=[("begin", 0, 0, 0, 4), ("begin", 1, 0, 2, 0, 2), ("catch_up", 1), ("begin", 2, 0, 3, 1)])
def test_whatever_comes_and_goes_the_runs_are_the_longest_common_prefixes(tile_blocks, what):
    tables = Tables(tile_blocks)
    for name, *arguments in what:
        getattr(tables, name)(*arguments)
        tables.check()
    for row in list(tables.tables):
        tables.end(row)
        tables.check()
    assert tables.tree.current() is NO_SHARED_RUNS


def runs_of(tree):
    current = tree.current()
    offsets = current.row_offsets
    return sorted(
        (first, end, sorted(current.rows[offsets[i] : offsets[i + 1]]))
        for i, (first, end) in enumerate(zip(current.first_block, current.end_block, strict=True))
    )


def test_several_levels():
    tree = RunTree(4)
    stem, branch = list(range(60)), list(range(60, 80))
    tree.add(0, [*stem, *branch, 900], 0)
    tree.add(1, [*stem, *branch, 901], 80)
    tree.add(2, [*stem, 902], 60)
    assert runs_of(tree) == [(0, 60, [0, 1, 2]), (60, 80, [0, 1])]
    tree.remove(2)
    assert runs_of(tree) == [(0, 80, [0, 1])]
    tree.remove(0)
    assert tree.current() is NO_SHARED_RUNS


def test_rows_that_found_nobody_while_they_waited_are_found_together():
    """They began when what they share was still being computed, and so brought none of it."""
    tree = RunTree(1)
    tables = {0: [0, 2, 3], 1: [0, 2, 5, 7], 2: [0, 2, 5, 8], 3: [0, 2, 5, 6]}
    for row, num_blocks in ((0, 0), (1, 0), (2, 0), (3, 3)):
        tree.add(row, tables[row], num_blocks)
    tree.check_invariants({row: (table, len(table)) for row, table in tables.items()})
    assert runs_of(tree) == [(0, 2, [0, 1, 2, 3]), (2, 3, [1, 2, 3])]


def test_rows_that_found_nobody_may_be_shorter_than_what_the_one_who_finds_them_brings():
    tree = RunTree(1)
    tables = {0: [0, 1], 1: [0, 1], 2: [0, 1, 2, 3]}
    for row, num_blocks in ((0, 0), (1, 0), (2, 3)):
        tree.add(row, tables[row], num_blocks)
    tree.check_invariants({row: (table, len(table)) for row, table in tables.items()})
    assert runs_of(tree) == [(0, 2, [0, 1, 2])]


def test_a_run_whose_rows_all_go_on_together_stays_one():
    tree = RunTree(1)
    tables = {0: [0, 2, 3], 1: [0, 2, 5], 2: [0, 2, 6]}
    for row, num_blocks in ((0, 0), (1, 1), (2, 2)):
        tree.add(row, tables[row], num_blocks)
    tree.check_invariants({row: (table, len(table)) for row, table in tables.items()})
    assert runs_of(tree) == [(0, 2, [0, 1, 2])]


def test_a_run_whose_rows_all_go_on_is_one_with_that_below_though_some_end_there():
    tree = RunTree(1)
    tables = {0: [0, 1, 2], 1: [0, 1], 2: [0, 1, 2]}
    for row, num_blocks in ((0, 0), (1, 1), (2, 3)):
        tree.add(row, tables[row], num_blocks)
    tree.check_invariants({row: (table, len(table)) for row, table in tables.items()})
    assert runs_of(tree) == [(0, 2, [0, 1, 2]), (2, 3, [0, 2])]


def test_runs_begin_and_end_with_tiles():
    tree = RunTree(4)
    tree.add(0, list(range(20)), 0)
    tree.add(1, [*range(7), 100], 7)
    tree.add(2, [*range(14), 200], 14)
    assert runs_of(tree) == [(0, 4, [0, 1, 2]), (4, 12, [0, 2])]


def test_two_runs_may_begin_with_one_block_that_is_less_than_a_tile():
    tree = RunTree(2)
    tables = {0: [0, 1], 1: [0, 2], 2: [0, 1], 3: [0, 2]}
    for row, num_blocks in ((0, 0), (1, 1), (2, 2), (3, 2)):
        tree.add(row, tables[row], num_blocks)
    tree.check_invariants({row: (table, len(table)) for row, table in tables.items()})
    assert runs_of(tree) == [(0, 2, [0, 2]), (0, 2, [1, 3])]


def test_fewer_blocks_than_a_tile_are_no_run():
    tree = RunTree(4)
    tree.add(0, [1, 2, 3, 4], 0)
    tree.add(1, [1, 2, 3, 5], 3)
    assert tree.current() is NO_SHARED_RUNS


def test_while_nothing_changes_it_is_the_same_object():
    tree = RunTree(1)
    first, second = [1, 2, 3], [1, 2, 4]
    tree.add(0, first, 0)
    tree.add(1, second, 2)
    told = tree.current()
    first.append(5)
    second.append(6)
    tree.add(2, [7, 8], 0)
    tree.remove(2)
    assert tree.current() is told


PREFIX = [0, 1, 1, 0] * 4


def decode_together(sim, prompts, **options):
    """Submit the prompts together and go on until all of them decode; the steps."""
    ids = [sim.submit(prompt, max_tokens=8, **options) for prompt in prompts]
    steps = []
    while not all(sim.heard(request_id)[0] >= 4 for request_id in ids):
        steps.append(sim.round())
        sim.check()
    return steps


def wide(**options):
    return Simulation(num_blocks=80, max_model_len=60, max_tokens_per_step=200, **options)


def test_followers_share_what_was_computed_beside_them_from_the_next_step_on():
    sim = wide()
    steps = decode_together(sim, [[*PREFIX, 0], [*PREFIX, 1], [*PREFIX, 1, 1]])
    assert steps[0].shared_runs is NO_SHARED_RUNS, "the blocks are computed in this very step"
    assert steps[1].shared_runs.end_block == [8]
    assert len(steps[1].shared_runs.rows) == 3


def test_steady_decoding_reuses_the_object():
    sim = wide()
    steps = decode_together(sim, [[*PREFIX, 0], [*PREFIX, 1]])
    assert {id(step.shared_runs) for step in steps[1:]} == {id(steps[1].shared_runs)}


def test_choices_share_their_prompt():
    sim = wide()
    steps = decode_together(sim, [[*PREFIX, 0]], num_choices=3)
    assert (steps[-1].shared_runs.end_block, len(steps[-1].shared_runs.rows)) == ([8], 3)


def test_choices_of_a_forgotten_prompt_share_blocks_that_are_no_trees():
    sim = wide()
    request = sim.submit([*PREFIX, 0], max_tokens=8, num_choices=2)
    sim.round()
    sim.forget(PREFIX, b"")
    step = sim.round()
    assert sim.terminal(request) is None
    assert (step.shared_runs.end_block, len(step.shared_runs.rows)) == ([8], 2)
    sim.check()


def test_a_conversation_that_goes_on_shares_the_answer_as_well():
    sim = wide()
    first = sim.submit(PREFIX, max_tokens=20)
    while sim.heard(first)[0] < 6:
        sim.round()
    said = [token for token, _ in sim.checker.requests[first].says[0][:4]]
    sim.submit([*PREFIX, *said, 0], max_tokens=4)
    step = sim.round()
    assert step.shared_runs.end_block == [10], "8 blocks of the prompt and 2 of the answer"
    sim.check()
    sim.finish_all()


def test_prompt_chunks_share_with_those_who_decode():
    sim = wide()
    sim.submit([*PREFIX, 0], max_tokens=20)
    sim.round()
    sim.submit([*PREFIX, 1, 1, 1, 1, 1, 1], max_tokens=4)
    step = sim.round()
    assert step.started[0].num_tokens == 6
    assert step.shared_runs.end_block == [8]
    sim.finish_all()


def test_two_steps_in_flight_share_only_what_is_known_to_be_computed():
    sim = wide(max_in_flight=2)
    decode_together(sim, [[*PREFIX, 0], [*PREFIX, 1], [*PREFIX, 1, 0]])
    assert sim.executor.num_shared_blocks > 0
    sim.finish_all()


def test_abort_and_preemption_end_a_rows_share():
    sim = wide()
    decode_together(sim, [[*PREFIX, 0], [*PREFIX, 1], [*PREFIX, 1, 0]])
    sim.abort(sim.checker.open()[0])
    assert len(sim.round().shared_runs.rows) == 2
    sim.abort(sim.checker.open()[0])
    assert sim.round().shared_runs is NO_SHARED_RUNS
    sim.finish_all()
