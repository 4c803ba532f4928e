"""Drafted tokens verified: all of a row's are computed in the step's one forward pass, and the target says of each whether it stays.

By *coupling*, a drafted token stays while it is what the target samples in its place, with the noise that it always samples this position with: so the output is the one
without drafts, token for token. By *rejection* (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; Chen et al., "Accelerating large language
model decoding with speculative sampling", 2023), a token x that was drafted with probability q(x) stays with probability min(1, p(x) / q(x)), and where it doesn't, one is drawn from what
p exceeds q by: so the output has the target's distribution. Prompt lookup draws nothing, its q(x) is 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvd.executor.sampling.columns import Draws
from kvd.executor.sampling.noise import gumbel, stream_keys
from kvd.executor.sampling.sampler import probabilities

_ACCEPTS = 1 << 32
_REDRAWS = 1 << 33
"""Added to the choice, these name streams of noise of their own: the choice's own stream has drawn the draft."""


def reject(logits: Tensor, draws: Draws, chosen: np.ndarray, drafted: np.ndarray, probs: Tensor | None) -> np.ndarray:
    """By rejection, what the draws' positions get: the drafted token where it is accepted, else another one.

    Shaped ``logits [N, V]`` of the draws (``sampler.shape``), the target's own samples ``chosen [N]``, which stay where nothing was drafted (``drafted [N]`` is -1), and
    the distributions ``probs [N, V]`` that the drafted ids were drawn from; None: they were not drawn.
    """
    which = np.flatnonzero(drafted >= 0)
    if not len(which):
        return chosen
    device = logits.device

    def to(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    target = probabilities(logits, draws)[to(which)]
    ids = to(drafted[which])[:, None]
    proposed = torch.zeros_like(target).scatter_(1, ids, 1.0) if probs is None else probs[to(which)]
    accepts = stream_keys(draws.seed[which], draws.choice[which] + _ACCEPTS, draws.position[which])
    uniform = torch.exp(-torch.exp(-gumbel(accepts, torch.zeros(1, dtype=torch.int64, device=device))))
    accepted = (uniform * proposed.gather(1, ids) < target.gather(1, ids)).squeeze(1)
    redraws = stream_keys(draws.seed[which], draws.choice[which] + _REDRAWS, draws.position[which])
    rest = (target - proposed).clamp_(min=0.0).log_()
    others = (rest + gumbel(redraws, torch.arange(target.shape[1], device=device))).argmax(dim=-1)
    token_ids = chosen.copy()
    token_ids[which] = torch.where(accepted, ids.squeeze(1), others).cpu().numpy()
    return token_ids
