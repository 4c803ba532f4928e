"""The fake executor: right bytes give the same answer whatever the schedule, wrong bytes give another."""

from __future__ import annotations

import random

import pytest

from kvd.executor.fake import EOS_TOKEN_ID, GROUP, FakeRunner, SharedRunError
from kvd.step import BlockCopy, ContinuedRows, SchedulerOutput, SharedRuns, StartedRow
from kvd.types import SamplingParams, pack_tokens

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 4
PROMPT = list(b"The quick brown fox jumps.")


def step(number, *, started=(), rows=(), num_tokens=(), blocks=(), released=(), copies=()):
    offsets, ids = [0], []
    for appended in blocks or [()] * len(rows):
        ids.extend(appended)
        offsets.append(len(ids))
    return SchedulerOutput(
        number, tuple(started), ContinuedRows(list(rows), list(num_tokens), offsets, ids), tuple(released), tuple(copies)
    )


def start(tokens, block_ids, *, row=0, num_tokens=None, num_computed=0, sampling=GREEDY, **more):
    todo = len(tokens) - num_computed if num_tokens is None else num_tokens
    return StartedRow(
        row=row,
        token_ids=pack_tokens(tokens),
        num_prompt_tokens=more.pop("num_prompt_tokens", len(tokens)),
        num_computed=num_computed,
        num_tokens=todo,
        block_ids=tuple(block_ids),
        sampling=sampling,
        **more,
    )


def generate(runner, tokens, block_ids, count, *, row=0, **more):
    """Start a row and decode ``count`` tokens."""
    output = runner.execute(step(0, started=[start(tokens, block_ids, row=row, **more)]))
    tokens_out = list(output.token_ids)
    while len(tokens_out) < count:
        tokens_out += runner.execute(step(len(tokens_out), rows=[row], num_tokens=[1])).token_ids
    return tokens_out


def table(num_tokens, first=0):
    return range(first, first + -(-num_tokens // BLOCK))


@pytest.fixture
def runner():
    return FakeRunner(64, BLOCK, max_rows=8)


@pytest.fixture
def expected():
    return generate(FakeRunner(64, BLOCK), PROMPT, table(40), 12)


def test_the_answer_is_printable_and_depends_on_the_prompt(runner, expected):
    assert all(32 <= token < 127 or token == EOS_TOKEN_ID for token in expected)
    other = generate(runner, list(b"the quick brown fox jumps."), table(40), 12)
    assert other != expected


def test_chunks_batches_and_other_blocks_give_the_same_answer(runner, expected):
    shuffled = random.Random(3).sample(range(64), 20)
    output = runner.execute(step(0, started=[start(PROMPT, shuffled[:2], num_tokens=7), start(list(b"bystander"), range(60, 64), row=1)]))
    assert output.rows == [1]  # a middle chunk samples nothing
    output = runner.execute(step(1, rows=[1, 0], num_tokens=[1, len(PROMPT) - 7], blocks=[(), shuffled[2:]]))
    tokens = [token for row, token in zip(output.rows, output.token_ids, strict=True) if row == 0]
    for number in range(11):
        tokens += runner.execute(step(2 + number, rows=[0], num_tokens=[1])).token_ids
    assert tokens == expected


def test_a_restored_prefix_gives_the_same_answer_in_other_blocks(runner, expected):
    generate(runner, PROMPT, table(40), 1)
    row_bytes = runner.groups()[0].row_bytes
    saved = bytearray(5 * row_bytes)
    runner.read_blocks(GROUP, [0, 1, 2, 3, 4], memoryview(saved))
    other = FakeRunner(64, BLOCK)
    other.write_blocks(GROUP, [33, 9, 40, 2, 17], memoryview(bytes(saved)))
    assert generate(other, PROMPT, [33, 9, 40, 2, 17, *range(50, 60)], 12, num_computed=20) == expected
    again = bytearray(5 * row_bytes)
    other.read_blocks(GROUP, [33, 9, 40, 2, 17], memoryview(again))
    assert again == saved


def stale(saved, row_bytes):
    saved[2 * row_bytes : 3 * row_bytes] = bytes(row_bytes)


def swapped(saved, row_bytes):
    saved[: 2 * row_bytes] = saved[row_bytes : 2 * row_bytes] + saved[:row_bytes]


def half_copied(saved, row_bytes):
    saved[row_bytes // 2 : row_bytes] = bytes(row_bytes - row_bytes // 2)


def one_bit(saved, row_bytes):
    saved[3 * row_bytes + 5] ^= 1


@pytest.mark.parametrize("damage", [stale, swapped, half_copied, one_bit])
def test_a_wrong_block_changes_the_answer(runner, expected, damage):
    generate(runner, PROMPT, table(40), 1)
    row_bytes = runner.groups()[0].row_bytes
    saved = bytearray(5 * row_bytes)
    runner.read_blocks(GROUP, range(5), memoryview(saved))
    damage(saved, row_bytes)
    other = FakeRunner(64, BLOCK)
    other.write_blocks(GROUP, range(5), memoryview(saved))
    assert generate(other, PROMPT, table(40), 12, num_computed=20) != expected


def test_a_swapped_table_changes_the_answer(runner, expected):
    generate(runner, PROMPT, table(40), 1)
    assert generate(runner, PROMPT, [1, 0, *range(2, 10)], 12, row=1, num_computed=20) != expected


def test_copy_on_write_leaves_the_source_and_replaces_the_tables_entry(runner, expected):
    generate(runner, PROMPT, table(40), 1)
    first = expected[0]
    before = bytearray(runner.groups()[0].row_bytes)
    runner.read_blocks(GROUP, [6], memoryview(before))
    fork = start([*PROMPT, first], [0, 1, 2, 3, 4, 5, 20, 21, 22], row=1, num_computed=len(PROMPT), num_prompt_tokens=len(PROMPT))
    output = runner.execute(step(1, started=[fork], rows=[0], num_tokens=[1], copies=[BlockCopy(6, 20, 6, 1), BlockCopy(6, 30, 6, 0)]))
    assert sorted(output.rows) == [0, 1]
    assert output.token_ids == [expected[1]] * 2
    after = bytearray(len(before))
    runner.read_blocks(GROUP, [6], memoryview(after))
    assert after == before
    assert runner.execute(step(2, rows=[0], num_tokens=[1])).token_ids == [expected[2]]
    assert runner.execute(step(3, rows=[1], num_tokens=[1])).token_ids == [expected[2]]


def test_noise_depends_on_seed_choice_and_position_only_and_greedy_on_none(runner, expected):
    assert generate(runner, PROMPT, table(40), 12, sampling=SamplingParams(temperature=0.0, seed=9)) == expected
    warm = SamplingParams(temperature=1.0, seed=1)
    alone = generate(runner, PROMPT, table(40), 12, sampling=warm)
    assert alone == generate(FakeRunner(64, BLOCK), PROMPT, table(40, 20), 12, sampling=warm)
    assert alone != expected
    assert alone != generate(runner, PROMPT, table(40), 12, sampling=SamplingParams(temperature=1.0, seed=2))
    assert alone != generate(runner, PROMPT, table(40), 12, sampling=warm, choice=1)
    preempted = generate(runner, [*PROMPT, *alone[:5]], table(40, 30), 7, sampling=warm, num_prompt_tokens=len(PROMPT))
    assert preempted == alone[5:]


def test_several_choices_are_sampled_from_one_prompt(runner):
    sampling = SamplingParams(temperature=1.0, seed=4, num_logprobs=2)
    output = runner.execute(step(0, started=[start(PROMPT, table(40), sampling=sampling, num_choices=3)]))
    assert (output.rows, output.choices) == ([0, 0, 0], [0, 1, 2])
    for choice in range(3):
        alone = FakeRunner(64, BLOCK).execute(step(0, started=[start(PROMPT, table(40), sampling=sampling, choice=choice)]))
        assert alone.token_ids == [output.token_ids[choice]]
    assert len(set(output.token_ids)) > 1
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert len({entry.top for entry in output.logprobs}) == 1
    (first, most), (_, less) = output.logprobs[0].top
    assert generate(FakeRunner(64, BLOCK), PROMPT, table(40), 1) == [first]
    assert all(entry.logprob <= most and (entry.logprob <= less or entry.token_id == first) for entry in output.logprobs)
    following = runner.execute(step(1, rows=[0], num_tokens=[1]))
    assert (following.rows, following.choices) == ([0], [0])


def test_banned_ids_do_not_appear_before_min_tokens(runner):
    banned = tuple(range(32, 127)[:-1])
    tokens = generate(runner, PROMPT, table(60), 30, banned_token_ids=(EOS_TOKEN_ID, *b"eto"), min_tokens=30)
    assert not set(tokens) & {EOS_TOKEN_ID, *b"eto"}
    tokens = generate(runner, PROMPT, table(60), 30, banned_token_ids=(EOS_TOKEN_ID, *banned), min_tokens=1)
    assert tokens[1:] == generate(FakeRunner(64, BLOCK), [*PROMPT, tokens[0]], table(60), 29)


def test_the_end_of_sequence_comes_now_and_then(runner):
    seen = [
        runner.execute(step(number, released=[0], started=[start([number % 256, number // 256], [0])])).token_ids[0]
        for number in range(6000)
    ]
    assert 1 <= seen.count(EOS_TOKEN_ID) <= 30


def test_a_poisoned_row_fails_alone_until_it_is_started_anew():
    runner = FakeRunner(64, BLOCK, poison_token_id=255)
    output = runner.execute(step(0, started=[start([1, 255, 2], [0]), start([1, 2, 3], [1], row=1)]))
    assert (output.rows, output.failed_rows) == ([1], (0,))
    output = runner.execute(step(1, rows=[0, 1], num_tokens=[1, 1], blocks=[(), (2,)]))
    assert (output.rows, output.failed_rows) == ([1], (0,))
    output = runner.execute(step(2, released=[0], started=[start([1, 2], [0])]))
    assert (output.rows, output.failed_rows) == ([0], ())


def test_another_seed_or_block_size_is_another_model():
    models = [FakeRunner(8, BLOCK), FakeRunner(8, BLOCK, weights_seed=1), FakeRunner(8, 2 * BLOCK)]
    assert len({model.groups()[0].fingerprint for model in models}) == 3
    assert generate(models[0], PROMPT, range(8), 6) != generate(models[1], PROMPT, range(8), 6)


def test_a_wrong_step_raises(runner):
    with pytest.raises(KeyError, match="row 3"):
        runner.execute(step(0, rows=[3], num_tokens=[1]))
    with pytest.raises(IndexError, match="1 blocks"):
        runner.execute(step(0, started=[start(PROMPT, [0])]))
    with pytest.raises(IndexError, match="block 64"):
        runner.read_blocks(GROUP, [64], memoryview(bytearray(runner.groups()[0].row_bytes)))


def test_shared_runs_must_be_of_the_same_computed_blocks(runner):
    """A wrong run is a wrong token in an executor that attends to it once for all of its rows."""
    first = [*PROMPT[:8], *b"one more"]
    second = [*PROMPT[:8], *b"other words"]
    both = [start(first, [0, 1, 2, 3], row=0), start(second, [0, 1, 4, 5, 6], row=1, num_computed=8)]

    def next_step(end, rows=(0, 1)):
        return SchedulerOutput(1, (), ContinuedRows([0, 1], [1, 1], [0, 1, 1], [7]), shared_runs=SharedRuns([0], [end], [0, 2], list(rows)))

    with pytest.raises(SharedRunError, match="are not computed"):
        runner.execute(SchedulerOutput(0, tuple(both), ContinuedRows(), shared_runs=SharedRuns([0], [2], [0, 2], [0, 1])))
    runner.execute(step(0, started=both, released=[0, 1]))
    runner.execute(next_step(2))
    with pytest.raises(SharedRunError, match="are not those of row 0"):
        runner.execute(next_step(3))


def test_a_block_that_begins_a_new_life_is_not_computed_yet(runner):
    """What an earlier owner left in it does not count."""
    runner.execute(step(0, started=[start(PROMPT, table(len(PROMPT)))]))
    rows = [start(PROMPT, table(len(PROMPT)), row=0, num_tokens=4), start(PROMPT, table(len(PROMPT)), row=1, num_computed=24)]
    with pytest.raises(SharedRunError, match="are not computed"):
        runner.execute(SchedulerOutput(1, tuple(rows), ContinuedRows(), (0,), shared_runs=SharedRuns([0], [2], [0, 2], [0, 1])))
