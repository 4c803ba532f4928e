"""Counter-based noise: a draw is a function of (seed, choice, absolute position, token id) and of nothing else.

Each (seed, choice, position) names a SplitMix64 stream (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the
mixing function is Stafford's variant 13), and token id i takes the stream's output number i. There is no state to keep, to save or to
share: the same seed gives the same noise in any batch, after a preemption, a fork or a restart.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LARGEST_BELOW_ONE = 1 - 2**-24


def stream_keys(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64 ``[R]``: the initial states of the streams. ``seeds`` uint64, ``choices`` and ``positions`` not negative, all ``[R]``."""
    state: np.ndarray = seeds.astype(np.uint64)
    for part in (choices, positions):
        state = np.bitwise_xor(_mix(state + np.uint64(_GAMMA)), part.astype(np.uint64))
    return _mix(state + np.uint64(_GAMMA))


def gumbel(keys: np.ndarray | Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise in float32, one value for each key and token id.

    ``keys`` uint64 ``[R]``, or on the device of ``token_ids`` as int64 of the same bits; ``token_ids`` int64 ``[V]`` (the same for all keys) or ``[R, C]``. Returns ``[R, V]`` or ``[R, C]``. Values lie between
    -3 and 23: the uniform has 32 bits and is never 0 or 1.
    """
    bits_of_keys = torch.from_numpy(keys.view(np.int64)).to(token_ids.device) if isinstance(keys, np.ndarray) else keys
    state = bits_of_keys[:, None]
    # int64 wraps as uint64 does; right shifts are made logical by a mask
    bits = state + (token_ids + 1) * _signed(_GAMMA)
    bits = bits.bitwise_xor_((bits >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX_1))
    bits = bits.bitwise_xor_((bits >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX_2))
    bits = bits.bitwise_xor_((bits >> 31).bitwise_and_((1 << 33) - 1))
    uniform = (bits >> 32).bitwise_and_((1 << 32) - 1).float().add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    # small uniforms decide who wins; log1p keeps their precision
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_1)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_2)
    return bits ^ (bits >> np.uint64(31))


def _signed(constant: int) -> int:
    return constant - (1 << 64)
