"""Which tokens may be drawn: the flat rules against a plain reading of them, their cost to others, and rows for which they leave nothing."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import itertools  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvd.executor.fake_rules import FakeRules  # noqa: E402
from kvd.executor.sampling.columns import SamplingColumns  # noqa: E402
from kvd.executor.sampling.penalties import TokenCounts  # noqa: E402
from kvd.executor.sampling.rules import TokenRules  # noqa: E402
from kvd.executor.sampling.sampler import sample  # noqa: E402
from kvd.step import StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

VOCAB = 12
CPU = torch.device("cpu")


def started(row, prompt, output=(), *, min_tokens=0, early=(), **sampling):
    tokens = [*prompt, *output]
    return StartedRow(
        row=row,
        token_ids=pack_tokens(tokens),
        num_prompt_tokens=len(prompt),
        num_computed=0,
        num_tokens=len(tokens),
        block_ids=(),
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        min_tokens=min_tokens,
        banned_token_ids=tuple(early),
    )


def draw(rows, logits, columns=None):
    """The draws that follow all known tokens of ``rows``, each its own row of ``logits``."""
    columns = columns or SamplingColumns(len(rows))
    known = np.full((len(rows), 40), -1, dtype=np.int32)
    positions = np.zeros(len(rows), dtype=np.int64)
    for row in rows:
        columns.start(row)
        tokens = np.frombuffer(row.token_ids, dtype="<u4")
        known[row.row, : len(tokens)], positions[row.row] = tokens, len(tokens)
    draws, _ = columns.draws(np.arange(len(rows)), positions, known)
    return sample(logits.clone(), draws, TokenCounts(len(rows), VOCAB, CPU))


ids = st.integers(0, VOCAB - 1)
one_row = st.fixed_dictionaries(
    {
        "output": st.lists(ids, max_size=4),
        "min_tokens": st.integers(0, 4),
        "early": st.lists(ids, max_size=3, unique=True),
        "logit_bias": st.dictionaries(ids, st.integers(-100, 100).map(float), max_size=4).map(lambda each: tuple(each.items())),
        "allowed_token_ids": st.lists(ids, max_size=5, unique=True).map(tuple),
        "banned_token_ids": st.lists(ids, max_size=4, unique=True).map(tuple),
        "bad_words": st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "num_logprobs": st.sampled_from([None, 2]),
    }
)


@settings(max_examples=200, deadline=None)
@given(st.lists(one_row, min_size=1, max_size=4), st.integers(0, 1 << 16))
def test_a_batch_draws_what_the_plain_rules_leave(asked, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((len(asked), VOCAB), generator=generator) * 5
    rows = [started(number, (1, 2), **each) for number, each in enumerate(asked)]
    sampled = draw(rows, logits)
    for number, row in enumerate(rows):
        change = FakeRules(row).at(np.frombuffer(row.token_ids, dtype="<u4").tolist())
        changed = [logit if change is None else change(token, logit) for token, logit in enumerate(logits[number].tolist())]
        is_stuck = max(changed) == float("-inf")
        assert is_stuck == (sampled.stuck is not None and bool(sampled.stuck[number]))
        if not is_stuck:
            chosen = int(sampled.token_ids[number])
            assert changed[chosen] == pytest.approx(max(changed), abs=1e-4)
            if row.sampling.num_logprobs is not None:
                entry = sampled.logprobs[number]
                assert entry.logprob == pytest.approx(float(torch.log_softmax(logits[number], -1)[chosen]), abs=1e-5)
                assert entry.top[0][0] == int(logits[number].argmax()), "they are of the model's own distribution"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_nothing_forbidden_is_ever_drawn_and_nothing_is_nan(temperature, more):
    logits = torch.zeros((64, VOCAB))
    logits[:, 3] = 50.0
    for seed in range(20):
        rows = [
            started(
                row,
                (1,),
                temperature=temperature,
                seed=seed * 64 + row,
                allowed_token_ids=(3, 4, 5),
                banned_token_ids=(3,),
                num_logprobs=0,
                **more,
            )
            for row in range(64)
        ]
        sampled = draw(rows, logits)
        assert sampled.stuck is None
        assert set(sampled.token_ids.tolist()) <= {4, 5}
        assert all(np.isfinite(entry.logprob) for entry in sampled.logprobs)


def test_a_bad_word_is_met_in_the_output_alone_at_each_drafted_place_too():
    """The context of a draw ends with the tokens before its position, drafted ones among them."""
    row = started(0, (7, 8), bad_words=((8, 9), (4, 5, 6)))
    rules = TokenRules(1)
    rules.start(row)
    known = np.array([[7, 8, 4, 5, 6, 8, 9]], dtype=np.int32)
    positions = np.arange(2, 8)
    found = rules.of(np.zeros(6, dtype=np.int64), positions, known)
    assert list(zip(found.banned_draw.tolist(), found.banned_id.tolist(), strict=True)) == [(2, 6), (4, 9)]


def test_rows_without_rules_stay_in_the_queue_and_others_do_not():
    columns = SamplingColumns(6)
    asked = [
        started(0, (1,)),
        started(1, (1,), min_tokens=3, early=(0,)),
        started(2, (1,), logit_bias=((1, 1.0),)),
        started(3, (1,), bad_words=((1, 2),)),
        started(4, (1,), allowed_token_ids=(1,)),
        started(5, (1,), min_tokens=3),
    ]
    for row in asked:
        columns.start(row)
    for test, (row, position) in itertools.product((columns.are_plain, columns.are_untruncated), itertools.product(range(6), (1, 4))):
        is_plain = row in (0, 5) or (row == 1 and position == 4)
        assert test(np.array([row]), np.array([position])) is is_plain
    columns.start(started(2, (1,)))
    assert columns.are_plain(np.array([2]), np.array([1])), "the next owner of the row has no rules"


def test_rules_of_one_row_change_no_other_row():
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(1))
    alone = [int(draw([started(0, (1,), temperature=1.0, seed=row)], logits[row : row + 1]).token_ids[0]) for row in (0, 2)]
    rows = [started(0, (1,), temperature=1.0, seed=0), started(1, (1,), banned_token_ids=(1, 2)), started(2, (1,), temperature=1.0, seed=2)]
    together = draw(rows, logits).token_ids.tolist()
    assert [together[0], together[2]] == alone
