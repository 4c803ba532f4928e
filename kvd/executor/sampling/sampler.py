"""From logits to token ids, N draws at once: penalties, bias, what may be drawn, temperature, truncation, Gumbel-max.

Greedy draws take the largest logit, the lowest id among equals. Others take the largest ``log p + Gumbel noise`` over the kept ids, which is
a draw from the kept distribution (Gumbel 1954; Maddison et al., "A* sampling", 2014). What is kept: ``top_k``, of that ``top_p``, of that ``min_p``, all after
temperature. Each is a threshold on log p, so that equals are kept together and the outcome depends on the row's values alone, never on the order in which a
kernel happened to sort them or on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvd.executor.kernels.cpu import native
from kvd.executor.sampling.columns import Draws
from kvd.executor.sampling.noise import gumbel, stream_keys
from kvd.executor.sampling.penalties import TokenCounts
from kvd.types import TokenLogprobs

_WIDTHS = (256, 4096)
"""Most likely ids looked at before the whole vocabulary is sorted."""
_NOISE_VALUES = 1 << 17
"""Noise values made at once for untruncated draws: their integers stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """``token_ids`` int64 ``[N]``; ``logprobs`` is None if no draw asked, else has an entry or None a draw."""

    token_ids: np.ndarray
    logprobs: list[TokenLogprobs | None] | None
    stuck: np.ndarray | None = None
    """bool ``[N]``: draws for which the rules left nothing, so that their ids say nothing; None: nobody's."""


def sample(logits: Tensor, draws: Draws, counts: TokenCounts, amend: Callable[[Tensor, np.ndarray], np.ndarray] | None = None) -> Sampled:
    """Draw from float32 ``logits [N, V]``, finite, one row a draw. ``logits`` is used up.

    Log-probabilities are those of the model's own distribution: before penalties, rules, temperature and truncation. ``amend``, given the logits as ``shape`` leaves them and the
    ids drawn, has the last word on these.
    """
    asked = np.flatnonzero(draws.num_logprobs >= 0)
    raw = logits[_to(logits, asked)] if len(asked) else None
    stuck = shape(logits, draws, counts)
    chosen = _choose(logits, draws).cpu().numpy()
    if amend is not None:
        chosen = amend(logits, chosen)
    return Sampled(chosen, None if raw is None else _logprobs(raw, asked, chosen, draws.num_logprobs), stuck)


def shape(logits: Tensor, draws: Draws, counts: TokenCounts) -> np.ndarray | None:
    """What comes before temperature, in place on ``logits [N, V]``: penalties, then biases, then minus infinity for what may not be drawn.

    Returns bool ``[N]``: draws for which nothing is left, whose logits are 0 from here on; None where there are none.
    """
    if draws.penalised.any():
        counts.apply(logits, draws)
    rules, masks = draws.rules, draws.masks
    if rules is None and masks is None:
        return None
    restricted = np.zeros(0, dtype=np.int64)
    if rules is not None:
        rules.bias(logits)
        rules.forbid(logits)
        restricted = rules.restricted
    if masks is not None:
        masks.forbid(logits)
        restricted = np.union1d(restricted, masks.draws)
    nothing_left = (logits[_to(logits, restricted)].amax(dim=-1) == float("-inf")).cpu().numpy()
    if not nothing_left.any():
        return None
    stuck = np.zeros(len(logits), dtype=bool)
    stuck[restricted[nothing_left]] = True
    logits[_to(logits, np.flatnonzero(stuck))] = 0
    return stuck


def distribution(logits: Tensor, draws: Draws, counts: TokenCounts) -> Tensor:
    """Float32 ``[N, V]``: the probabilities with which ``sample`` would draw, of the same arguments. ``logits`` is used up."""
    shape(logits, draws, counts)
    return probabilities(logits, draws)


def probabilities(logits: Tensor, draws: Draws) -> Tensor:
    """As ``distribution``, of logits as ``shape`` leaves them. A greedy draw's has a single 1."""
    vocab_size = logits.shape[1]
    random = np.flatnonzero(draws.temperature > 0)
    probs = torch.zeros_like(logits).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    if len(random):
        log_p = torch.log_softmax(_scaled(logits, random, draws), dim=-1)
        threshold, _ = _threshold(torch.sort(log_p, dim=-1, descending=True).values, random, draws)
        is_cut = ((draws.top_k > 0) & (draws.top_k < vocab_size) | (draws.top_p < 1) | (draws.min_p > 0))[random]
        dropped = (log_p < threshold) & torch.from_numpy(is_cut).to(logits.device)[:, None]
        probs[_to(logits, random)] = torch.softmax(log_p.masked_fill_(dropped, float("-inf")), dim=-1)
    return probs


def _choose(logits: Tensor, draws: Draws) -> Tensor:
    random = draws.temperature > 0
    if not random.any():
        return logits.argmax(dim=-1)
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    keys = stream_keys(draws.seed, draws.choice, draws.position)
    truncated = random & ((draws.top_k > 0) & (draws.top_k < logits.shape[1]) | (draws.top_p < 1) | (draws.min_p > 0))
    if not random.all():
        greedy = _to(logits, np.flatnonzero(~random))
        chosen[greedy] = logits[greedy].argmax(dim=-1)
    if (random & ~truncated).any():
        _draw_untruncated(logits, np.flatnonzero(random & ~truncated), draws, keys, chosen)
    if truncated.any():
        _draw_truncated(logits, np.flatnonzero(truncated), draws, keys, chosen)
    return chosen


def _scaled(logits: Tensor, which: np.ndarray, draws: Draws) -> Tensor:
    """A copy of the draws' logits over their temperatures: log p but for a constant."""
    temperature = torch.from_numpy(draws.temperature[which]).to(logits.device)
    chosen = logits if len(which) == len(logits) else logits[_to(logits, which)]
    return chosen / temperature[:, None]


def _draw_untruncated(logits: Tensor, which: np.ndarray, draws: Draws, keys: np.ndarray, chosen: Tensor) -> None:
    if logits.device.type == "cpu" and native.status().isa is not None:
        # a row's draw is the native kernels' alone, whatever else the step holds: their logarithms round otherwise than torch's
        taken = np.empty(len(which), dtype=np.int64)
        rows = logits if len(which) == len(logits) else logits[_to(logits, which)]
        native.module().draw(native.pool(), rows.contiguous(), draws.temperature[which], keys[which], taken)
        chosen[_to(logits, which)] = torch.from_numpy(taken)
        return
    vocab = torch.arange(logits.shape[1], device=logits.device)
    at_once = max(1, _NOISE_VALUES // logits.shape[1])
    for first in range(0, len(which), at_once):
        part = which[first : first + at_once]
        scores = _scaled(logits, part, draws).add_(gumbel(keys[part], vocab))
        chosen[_to(logits, part)] = scores.argmax(dim=-1)


def _draw_truncated(logits: Tensor, which: np.ndarray, draws: Draws, keys: np.ndarray, chosen: Tensor) -> None:
    """Look at the most likely ids first, and at more of them only for the draws whose threshold lies beyond."""
    log_p = torch.log_softmax(_scaled(logits, which, draws), dim=-1)
    vocab_size = logits.shape[1]
    for width in (*(width for width in _WIDTHS if width < vocab_size), vocab_size):
        values, ids = torch.topk(log_p, width, dim=-1)
        threshold, final = _threshold(values, which, draws)
        settled = final.cpu().numpy() if width < vocab_size else np.ones(len(which), dtype=bool)
        if settled.any():
            done = _to(logits, np.flatnonzero(settled))
            values, ids = values[done], ids[done]
            scores = (values + gumbel(keys[which[settled]], ids)).masked_fill_(values < threshold[done], float("-inf"))
            equals = scores == scores.amax(dim=-1, keepdim=True)
            chosen[_to(logits, which[settled])] = ids.masked_fill(~equals, vocab_size).amin(dim=-1)
        if settled.all():
            return
        which, log_p = which[~settled], log_p[_to(logits, np.flatnonzero(~settled))]


def _threshold(values: Tensor, which: np.ndarray, draws: Draws) -> tuple[Tensor, Tensor]:
    """The smallest log p that is kept, ``[n, 1]``, judged by the ``values [n, width]`` of the most likely ids, in descending order.

    Second, bool ``[n]``: whether no id beyond these could change that.
    """

    def column(source: np.ndarray) -> Tensor:
        return torch.from_numpy(source[which]).to(values.device)[:, None]

    top_k, top_p = column(draws.top_k), column(draws.top_p)
    everything = values[:, -1:]
    counted = top_k > 0
    kth = torch.where(counted, values.gather(1, top_k.clamp(1, values.shape[1]) - 1), everything)
    mass = values.exp().cumsum(dim=-1)
    # of the ids that top_k keeps, those before which less than top_p of their mass lies
    kept_mass = torch.where(counted, mass.gather(1, (values >= kth).sum(dim=-1, keepdim=True) - 1), 1.0)
    before = torch.cat([torch.zeros_like(kth), mass[:, :-1]], dim=-1)
    num_kept = (before < top_p * kept_mass).sum(dim=-1, keepdim=True).clamp_(min=1)
    nucleus = torch.where(top_p < 1, values.gather(1, num_kept - 1), everything)
    threshold = torch.maximum(torch.maximum(kth, nucleus), values[:, :1] + column(draws.min_p).log())
    return threshold, ((everything < threshold) & (~counted | (everything < kth))).squeeze(1)


def _logprobs(raw: Tensor, asked: np.ndarray, chosen: np.ndarray, num_logprobs: np.ndarray) -> list[TokenLogprobs | None]:
    """Of the draws ``asked``, whose logits are ``raw [len(asked), V]``."""
    entries: list[TokenLogprobs | None] = [None] * len(chosen)
    if raw.device.type == "cpu" and native.status().isa is not None:
        # as with draws: a step in the queue tells the native kernels' numbers
        scored = native.module().score(native.pool(), raw.contiguous(), num_logprobs[asked], chosen[asked])
        for draw, (logprob, top) in zip(asked.tolist(), scored, strict=True):
            entries[draw] = TokenLogprobs(int(chosen[draw]), logprob, top)
        return entries
    raw = torch.log_softmax(raw, dim=-1)
    most = int(num_logprobs.max())
    values, ids = torch.topk(raw, min(most, raw.shape[1]), dim=-1)
    own = raw.gather(1, _to(raw, chosen[asked])[:, None]).squeeze(1).tolist()
    for draw, logprob, top_ids, top_values in zip(asked.tolist(), own, ids.tolist(), values.tolist(), strict=True):
        top = tuple(zip(top_ids, top_values, strict=True))[: num_logprobs[draw]]
        entries[draw] = TokenLogprobs(int(chosen[draw]), logprob, top)
    return entries


def _to(like: Tensor, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).to(like.device)
