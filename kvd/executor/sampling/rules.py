"""Which tokens a row may sample, and which of them it favours: bias, allowed and banned ids, bad words, and what ``min_tokens`` forbids.

Each row's rules are kept from its start as arrays; a step's are flat arrays of (draw, token id), so that they cost what they name, whatever the vocabulary.
A bad word is a sequence of ids: the last is banned where the output ends in the others. An output that must be continued, and for which the rules leave nothing, is *stuck*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvd.step import StartedRow

_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_VALUES = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class DrawRules:
    """The rules of one step's draws, as flat arrays: entry i of a pair concerns token ``*_id[i]`` in draw ``*_draw[i]``. int64, values float32."""

    bias_draw: np.ndarray
    bias_id: np.ndarray
    bias_value: np.ndarray
    """Nats; the ids of a draw are distinct."""
    allowed_draw: np.ndarray
    allowed_id: np.ndarray
    banned_draw: np.ndarray
    banned_id: np.ndarray

    def bias(self, logits: Tensor) -> None:
        """Add the biases to ``logits [N, V]`` in place."""
        if len(self.bias_draw):
            where = _to(logits, self.bias_draw), _to(logits, self.bias_id)
            logits[where] += torch.from_numpy(self.bias_value).to(logits.device)

    def forbid(self, logits: Tensor) -> None:
        """Minus infinity in the place of what ``logits [N, V]`` may not become, in place."""
        if len(self.allowed_draw):
            where = _to(logits, self.allowed_draw), _to(logits, self.allowed_id)
            kept = logits[where]
            logits[_to(logits, np.unique(self.allowed_draw))] = float("-inf")
            logits[where] = kept
        if len(self.banned_draw):
            logits[_to(logits, self.banned_draw), _to(logits, self.banned_id)] = float("-inf")

    @property
    def restricted(self) -> np.ndarray:
        """int64: the draws from which something was taken."""
        return np.union1d(self.allowed_draw, self.banned_draw)


NO_RULES = DrawRules(_NO_IDS, _NO_IDS, _NO_VALUES, _NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS)


@dataclass(frozen=True, slots=True)
class _RowRules:
    bias_id: np.ndarray
    bias_value: np.ndarray
    allowed: np.ndarray
    banned: np.ndarray
    early: np.ndarray
    """Banned too until ``min_tokens`` tokens are out."""
    words: tuple[tuple[np.ndarray, np.ndarray], ...]
    """Bad words of several ids, by length: all ids but the last ``[words, length - 1]``, the last ``[words]``."""
    num_prompt_tokens: int


class TokenRules:
    """The rules of every row that has some."""

    def __init__(self, max_rows: int) -> None:
        self._rows: dict[int, _RowRules] = {}
        self.always = np.zeros(max_rows, dtype=bool)
        """Rows with a rule that outlasts ``min_tokens``."""
        self.follows_output = np.zeros(max_rows, dtype=bool)
        """Rows with a rule that looks at what was sampled: bad words of several ids."""
        self._free_at = np.zeros(max_rows, dtype=np.int64)
        """Position from which on what ``min_tokens`` forbids may be drawn; 0 where it forbids nothing."""

    def start(self, started: StartedRow) -> None:
        """Note the rules of a row that begins."""
        row, sampling = started.row, started.sampling
        early = started.banned_token_ids if started.min_tokens else ()
        self._rows.pop(row, None)
        self._free_at[row] = started.num_prompt_tokens + started.min_tokens if early else 0
        self.always[row] = bool(sampling.logit_bias or sampling.allowed_token_ids or sampling.banned_token_ids or sampling.bad_words)
        self.follows_output[row] = any(len(word) > 1 for word in sampling.bad_words)
        if not early and not self.always[row]:
            return
        bias = dict(sampling.logit_bias)
        short = tuple(word[0] for word in sampling.bad_words if len(word) == 1)
        self._rows[row] = _RowRules(
            bias_id=np.array(list(bias), dtype=np.int64),
            bias_value=np.array(list(bias.values()), dtype=np.float32),
            allowed=np.array(sampling.allowed_token_ids, dtype=np.int64),
            banned=np.array((*sampling.banned_token_ids, *short), dtype=np.int64),
            early=np.array(early, dtype=np.int64),
            words=_by_length([word for word in sampling.bad_words if len(word) > 1]),
            num_prompt_tokens=started.num_prompt_tokens,
        )

    def hold(self, rows: np.ndarray, positions: np.ndarray) -> bool:
        """Whether a rule holds for one of ``rows`` at its position."""
        return bool(self._rows) and bool((self.always[rows] | (positions < self._free_at[rows])).any())

    def of(self, rows: np.ndarray, positions: np.ndarray, known: np.ndarray) -> DrawRules | None:
        """The rules of draws of ``rows`` at ``positions``, both ``[N]``; None if there are none.

        ``known [max_rows, positions]`` holds the rows' tokens, those drafted before a position included.
        """
        if not self.hold(rows, positions):
            return None
        biased: list[tuple[int, np.ndarray]] = []
        values: list[np.ndarray] = []
        allowed: list[tuple[int, np.ndarray]] = []
        banned: list[tuple[int, np.ndarray]] = []
        for draw, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            rules = self._rows.get(row)
            if rules is None:
                continue
            if len(rules.bias_id):
                biased.append((draw, rules.bias_id))
                values.append(rules.bias_value)
            if len(rules.allowed):
                allowed.append((draw, rules.allowed))
            if len(rules.banned):
                banned.append((draw, rules.banned))
            if position < self._free_at[row]:
                banned.append((draw, rules.early))
            for beginnings, last in rules.words:
                first = position - beginnings.shape[1]
                if first >= rules.num_prompt_tokens:
                    met = (beginnings == known[row, first:position]).all(axis=1)
                    if met.any():
                        banned.append((draw, last[met]))
        return DrawRules(*_flat(biased), np.concatenate(values) if values else _NO_VALUES, *_flat(allowed), *_flat(banned))


def _by_length(words: list[tuple[int, ...]]) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    groups: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        groups.setdefault(len(word), []).append(word)
    arrays = [np.array(group, dtype=np.int64) for group in groups.values()]
    return tuple((array[:, :-1], array[:, -1]) for array in arrays)


def _flat(entries: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if not entries:
        return _NO_IDS, _NO_IDS
    draws = np.repeat(np.array([draw for draw, _ in entries]), [len(ids) for _, ids in entries])
    return draws, np.concatenate([ids for _, ids in entries])


def _to(like: Tensor, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).to(like.device)
