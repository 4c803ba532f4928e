"""The batched sampler against a row-by-row float64 oracle, its distribution, and its independence of the batch."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import itertools  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from kvd.executor.sampling import sampler  # noqa: E402
from kvd.executor.sampling.columns import SamplingColumns  # noqa: E402
from kvd.executor.sampling.noise import gumbel, stream_keys  # noqa: E402
from kvd.executor.sampling.penalties import TokenCounts  # noqa: E402
from kvd.executor.sampling.sampler import sample  # noqa: E402
from kvd.step import StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

CPU = torch.device("cpu")


def started(row, sampling, prompt=(1, 2, 3), output=(), **more):
    tokens = [*prompt, *output]
    return StartedRow(
        row=row,
        token_ids=pack_tokens(tokens),
        num_prompt_tokens=len(prompt),
        num_computed=0,
        num_tokens=len(tokens),
        block_ids=(),
        sampling=sampling,
        **more,
    )


class Batch:
    """The sampler with its state, as the runner drives it."""

    def __init__(self, rows, vocab_size):
        self.rows = rows
        self.columns = SamplingColumns(max(row.row for row in rows) + 1)
        self.counts = TokenCounts(max(row.row for row in rows) + 1, vocab_size, CPU)
        for row in rows:
            self.columns.start(row)
            if self.columns.penalised(row.row):
                known = np.frombuffer(row.token_ids, dtype="<u4")
                self.counts.start(row.row, known[: row.num_prompt_tokens], known[row.num_prompt_tokens :])

    def draw(self, logits, extra_positions=0):
        numbers = np.array([row.row for row in self.rows])
        positions = np.array([len(row.token_ids) // 4 for row in self.rows]) + extra_positions
        known = np.zeros((max(numbers) + 1, 64), dtype=np.int32)
        for row in self.rows:
            known[row.row, : len(row.token_ids) // 4] = np.frombuffer(row.token_ids, dtype="<u4")
        draws, index = self.columns.draws(numbers, positions, known)
        return sample(logits[torch.from_numpy(index)].clone(), draws, self.counts), draws


def oracle(logits, row, choice=0):
    """The kept ids, and the id that is drawn, by the plain definitions."""
    sampling = row.sampling
    known = np.frombuffer(row.token_ids, dtype="<u4").astype(int)
    prompt, output = known[: row.num_prompt_tokens], known[row.num_prompt_tokens :]
    scores = logits.astype(np.float64)
    for token in set(known.tolist()):
        scores[token] = scores[token] / sampling.repetition_penalty if scores[token] > 0 else scores[token] * sampling.repetition_penalty
    for token in output.tolist():
        scores[token] -= sampling.frequency_penalty
    for token in set(output.tolist()):
        scores[token] -= sampling.presence_penalty
    if len(known) < len(prompt) + row.min_tokens:
        scores[list(row.banned_token_ids)] = -np.inf
    if sampling.temperature == 0:
        return None, int(scores.argmax())
    scores /= sampling.temperature
    p = np.exp(scores - scores.max())
    p /= p.sum()
    kept = p > 0
    if sampling.top_k:
        kept &= p >= np.sort(p)[::-1][min(sampling.top_k, len(p)) - 1]
    if sampling.top_p < 1:
        order = np.argsort(-p, kind="stable")
        order = order[kept[order]]
        mass = np.cumsum(p[order]) / p[kept].sum()
        smallest = p[order[int((np.concatenate([[0], mass[:-1]]) < sampling.top_p).sum()) - 1]]
        kept &= p >= smallest
    kept &= p >= sampling.min_p * p.max()
    key = stream_keys(np.array([sampling.seed], dtype=np.uint64), np.array([choice]), np.array([len(known)]))
    noise = gumbel(key, torch.arange(len(p)))[0].double().numpy()
    with np.errstate(divide="ignore"):
        return kept, int(np.where(kept, np.log(p) + noise, -np.inf).argmax())


GRID = list(
    itertools.product(
        [0.0, 0.5, 1.0, 3.0],
        [0, 1, 5, 300, 4500],
        [1.0, 0.9, 0.3],
        [0.0, 0.05],
        [(1.0, 0.0, 0.0), (1.3, 0.5, 0.25)],
    )
)


@pytest.mark.parametrize("vocab_size", [37, 6000])
def test_a_batch_of_unlike_rows_draws_what_the_oracle_draws(vocab_size):
    rng = np.random.default_rng(vocab_size)
    rows = []
    for number, (temperature, top_k, top_p, min_p, penalties) in enumerate(GRID):
        sampling = SamplingParams(temperature, top_k, top_p, min_p, *penalties, seed=number * 0x9E3779B97F4A7C1 % 2**64)
        tokens = rng.integers(0, vocab_size, 12).tolist()
        bans = {"banned_token_ids": (3, 5), "min_tokens": 7} if number % 3 == 0 else {}
        rows.append(started(number, sampling, tokens[:6], tokens[6:], choice=number % 4, **bans))
    logits = torch.from_numpy((rng.standard_normal((len(rows), vocab_size)) * 3).astype(np.float32))
    sampled, _ = Batch(rows, vocab_size).draw(logits)
    expected = [oracle(row_logits, row, row.choice)[1] for row_logits, row in zip(logits.numpy(), rows, strict=True)]
    assert sampled.token_ids.tolist() == expected
    assert sampled.logprobs is None


def test_one_row_draws_the_same_alone_as_in_a_batch():
    rng = np.random.default_rng(5)
    rows = [started(number, SamplingParams(1.2, top_k, top_p, seed=number)) for number, (_, top_k, top_p, _, _) in enumerate(GRID)]
    logits = torch.from_numpy((rng.standard_normal((len(rows), 9000)) * 2).astype(np.float32))
    together = Batch(rows, 9000).draw(logits)[0].token_ids.tolist()
    for row, row_logits, token_id in zip(rows, logits, together, strict=True):
        assert Batch([row], 9000).draw(row_logits[None])[0].token_ids.tolist() == [token_id]


def test_greedy_takes_the_lowest_id_of_equals_and_ignores_the_seed():
    logits = torch.zeros(2, 500)
    logits[0, [77, 30, 499]] = 2.0
    logits[1, [499, 498]] = 1.0
    rows = [started(0, SamplingParams(0.0, seed=1)), started(1, SamplingParams(1e-7, seed=2))]
    assert Batch(rows, 500).draw(logits)[0].token_ids.tolist() == [30, 498]
    mixed = [*rows, started(2, SamplingParams(1.0))]
    assert Batch(mixed, 500).draw(torch.cat([logits, logits[:1]]))[0].token_ids.tolist()[:2] == [30, 498]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1.0),
        SamplingParams(0.7),
        SamplingParams(1.0, top_k=4),
        SamplingParams(1.0, top_p=0.8),
        SamplingParams(1.5, min_p=0.2),
    ],
)
def test_frequencies_over_many_seeds_are_the_distribution(sampling):
    vocab_size, count = 12, 40_000
    logits = torch.from_numpy(np.random.default_rng(8).standard_normal(vocab_size).astype(np.float32) * 1.5)
    row = started(0, sampling)
    kept, _ = oracle(logits.numpy(), row)
    p = np.where(kept, np.exp(logits.numpy().astype(np.float64) / sampling.temperature), 0)
    p /= p.sum()
    columns = SamplingColumns(count)
    for number in range(count):
        columns.start(started(number, SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed=number)))
    draws, _ = columns.draws(np.arange(count), np.full(count, 3), np.zeros((count, 4), dtype=np.int32))
    sampled = sample(logits.expand(count, vocab_size).clone(), draws, TokenCounts(1, vocab_size, CPU))
    observed = np.bincount(sampled.token_ids, minlength=vocab_size)
    assert observed[~kept].sum() == 0
    chi_square = ((observed - p * count)[kept] ** 2 / (p * count)[kept]).sum()
    assert chi_square < 3 * vocab_size + 10


def test_positions_choices_and_seeds_draw_independently():
    logits = torch.zeros(1, 1000)
    seen = set()
    for seed, choice, position in itertools.product(range(5), range(4), range(5)):
        batch = Batch([started(0, SamplingParams(1.0, seed=seed), choice=choice)], 1000)
        seen.add(int(batch.draw(logits, position)[0].token_ids[0]))
    assert len(seen) > 85  # of 100 draws from 1000 ids about 95 differ


def test_choices_are_drawn_from_one_row_of_logits_at_its_first_sample_only():
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.standard_normal((2, 800)).astype(np.float32))
    rows = [started(0, SamplingParams(1.0, seed=6), num_choices=3), started(1, SamplingParams(1.0, seed=6))]
    batch = Batch(rows, 800)
    sampled, draws = batch.draw(logits)
    assert draws.row.tolist() == [0, 0, 0, 1]
    assert draws.choice.tolist() == [0, 1, 2, 0]
    expected = [oracle(logits[0].numpy(), rows[0], choice)[1] for choice in range(3)]
    assert sampled.token_ids.tolist() == [*expected, oracle(logits[1].numpy(), rows[1])[1]]
    assert batch.draw(logits, 1)[1].choice.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(0.0, presence_penalty=0.15), [0, 1, 0, 0]),  # 0 is worth .85 once it is out, 1 is worth .75
        (SamplingParams(0.0, frequency_penalty=0.15), [0, 1, 0, 2]),  # out twice, 0 is worth .7
        (SamplingParams(0.0, repetition_penalty=1.3), [1, 2, 0, 0]),  # the prompt's 0 is worth .77 from the beginning
    ],
)
def test_penalties_follow_what_is_put_out_and_forget_the_rows_last_use(sampling, expected):
    logits = torch.tensor([[1.0, 0.9, 0.8, 0.7]])
    batch = Batch([started(0, sampling, prompt=(0,))], 4)
    out = []
    for step in range(4):
        sampled, _ = batch.draw(logits, step)
        out.append(int(sampled.token_ids[0]))
        batch.counts.add(np.array([0]), sampled.token_ids)
    assert out == expected
    batch.counts.start(0, np.array([0], dtype="<u4"), np.array([], dtype="<u4"))
    assert batch.draw(logits)[0].token_ids.tolist() == expected[:1]


def test_bans_end_with_min_tokens():
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    batch = Batch([started(0, SamplingParams(0.0), banned_token_ids=(0, 1), min_tokens=2)], 3)
    assert [int(batch.draw(logits, step)[0].token_ids[0]) for step in range(4)] == [2, 2, 0, 0]


def test_logprobs_are_the_models_own_whatever_the_sampling_does():
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((4, 60)).astype(np.float32))
    rows = [
        started(0, SamplingParams(0.0, num_logprobs=0)),
        started(1, SamplingParams(0.5, top_k=3, repetition_penalty=2.0, num_logprobs=5), banned_token_ids=(4,), min_tokens=1),
        started(2, SamplingParams(1.0)),
        started(3, SamplingParams(1.0, num_logprobs=100)),
    ]
    sampled, _ = Batch(rows, 60).draw(logits)
    expected = torch.log_softmax(logits.double(), -1)
    assert sampled.logprobs is not None
    assert sampled.logprobs[2] is None
    for index, count in ((0, 0), (1, 5), (3, 60)):
        entry = sampled.logprobs[index]
        assert entry is not None
        assert entry.token_id == sampled.token_ids[index]
        assert entry.logprob == pytest.approx(float(expected[index, entry.token_id]), abs=1e-5)
        best = expected[index].argsort(descending=True)[:count].tolist()
        assert [token_id for token_id, _ in entry.top] == best
        assert [value for _, value in entry.top] == pytest.approx(expected[index, best].tolist(), abs=1e-5)


@pytest.mark.parametrize("widths", [(), (2,), (8, 64)])
def test_how_many_ids_are_looked_at_first_does_not_matter(monkeypatch, widths):
    rng = np.random.default_rng(11)
    logits = torch.from_numpy(np.round(rng.standard_normal((60, 300)) * 4).astype(np.float32) / 4)  # many equals
    grid = itertools.product([0, 1, 7, 64, 200], [1.0, 0.95, 0.5, 0.01], [0.0, 0.01, 0.3])
    rows = [started(number, SamplingParams(1.0, top_k, top_p, min_p, seed=number)) for number, (top_k, top_p, min_p) in enumerate(grid)]
    expected = Batch(rows, 300).draw(logits)[0].token_ids.tolist()
    monkeypatch.setattr(sampler, "_WIDTHS", widths)
    assert Batch(rows, 300).draw(logits)[0].token_ids.tolist() == expected
    kept = [oracle(row_logits, row)[0] for row_logits, row in zip(logits.numpy(), rows, strict=True)]
    assert all(keeps[token_id] for keeps, token_id in zip(kept, expected, strict=True))
