"""Repetition, presence and frequency penalties over what each row has said.

Repetition (Keskar et al., "CTRL", 2019) divides positive and multiplies negative logits of ids seen in the prompt or the output; presence and
frequency (OpenAI API) count the output alone and are subtracted afterwards.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvd.executor.sampling.columns import Draws


class TokenCounts:
    """Which ids a penalised row's prompt held and how often its output did; allocated when the first such row comes."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_rows, vocab_size)
        self._device = device
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._in_output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def start(self, row: int, prompt: np.ndarray, output: np.ndarray) -> None:
        """Count a row that begins; ``prompt`` and ``output`` are its known token ids."""
        if not len(self._in_prompt):
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._in_output = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        self._in_prompt[row] = False
        self._in_prompt[row, self._ids(prompt)] = True
        self._in_output[row] = torch.bincount(self._ids(output), minlength=self._shape[1])

    def add(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Count the token that each of ``rows`` (distinct) has put out."""
        self._in_output[self._ids(rows), self._ids(token_ids)] += 1

    def take_back(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Undo ``add`` of the same arguments."""
        self._in_output[self._ids(rows), self._ids(token_ids)] -= 1

    def apply(self, logits: Tensor, draws: Draws) -> None:
        """Change ``logits [N, V]`` of penalised draws in place."""
        which = np.flatnonzero(draws.penalised)
        index, rows = self._ids(which), self._ids(draws.row[which])
        counts = self._in_output[rows]
        if draws.drafted is not None:
            place = np.cumsum(draws.penalised) - 1
            of_penalised = draws.penalised[draws.drafted[0]]
            added = self._ids(place[draws.drafted[0][of_penalised]]), self._ids(draws.drafted[1][of_penalised])
            counts.index_put_(added, torch.ones_like(added[0], dtype=counts.dtype), accumulate=True)
        said = counts > 0
        seen = said | self._in_prompt[rows]
        changed = logits[index]
        repetition = self._column(draws.repetition_penalty[which])
        changed = torch.where(seen, torch.where(changed > 0, changed / repetition, changed * repetition), changed)
        changed -= self._column(draws.frequency_penalty[which]) * counts
        changed -= self._column(draws.presence_penalty[which]) * said
        logits[index] = changed

    def _column(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)[:, None]

    def _ids(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)
