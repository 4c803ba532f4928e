"""Log-probabilities of prompt tokens, each given those before it, out of the hidden states that the prompt's chunks leave behind."""

from __future__ import annotations

import numpy as np
import torch

from kvd.executor.input_batch import InputBatch, StepRows
from kvd.executor.step_model import StepHidden, finite_rows
from kvd.step import PromptLogprobs, StartedRow
from kvd.types import TokenLogprobs

_SLICE_VALUES = 8 << 20
"""Logits computed at once, at most: 32 MiB of them."""


class PromptScores:
    """The rows that asked, and how far their prompts reach. Called from the executor's thread."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        self._batch = batch
        self._most_tokens = max(1, _SLICE_VALUES // vocab_size)
        max_rows = len(batch.num_known)
        self._num_top = np.zeros(max_rows, dtype=np.int64)
        self._end = np.zeros(max_rows, dtype=np.int64)
        """Position up to which a row's hidden states say something of its prompt: that of the last prompt token; 0 where nobody asked."""

    def start(self, started: StartedRow) -> None:
        """Note what a row that begins asked for."""
        self._end[started.row] = 0 if started.prompt_logprobs is None else started.num_prompt_tokens - 1
        self._num_top[started.row] = started.prompt_logprobs or 0

    def are_wanted(self, rows: StepRows) -> bool:
        """Whether a row of the step computes positions of a prompt whose log-probabilities were asked for."""
        return bool((rows.attention.num_computed < self._end[rows.rows]).any())

    def of(self, rows: StepRows, hidden: StepHidden) -> tuple[PromptLogprobs, ...]:
        """What the step tells of prompts. Rows whose logits are not finite are marked as failed and have no entry."""
        if not self.are_wanted(rows):
            return ()
        scored = []
        for place in np.flatnonzero(rows.attention.num_computed < self._end[rows.rows]).tolist():
            row, first = int(rows.rows[place]), int(rows.attention.num_computed[place])
            if self._batch.failed[row]:
                continue
            last = min(first + int(rows.attention.num_tokens[place]), int(self._end[row]))
            begin = int(rows.attention.starts[place])
            entries = self._score(
                hidden, np.arange(begin, begin + last - first), self._batch.token_ids[row, first + 1 : last + 1], int(self._num_top[row])
            )
            if entries is None:
                self._batch.failed[row] = True
            else:
                scored.append(PromptLogprobs(row, first + 1, entries))
        return tuple(scored)

    def _score(self, hidden: StepHidden, tokens: np.ndarray, token_ids: np.ndarray, num_top: int) -> tuple[TokenLogprobs, ...] | None:
        """Of ``token_ids [n]``, each after the flat token of ``tokens [n]``; None if a logit is not finite."""
        entries: list[TokenLogprobs] = []
        for start in range(0, len(tokens), self._most_tokens):
            some = slice(start, start + self._most_tokens)
            logits = hidden.logits(tokens[some])
            if not finite_rows(logits).all():
                return None
            logprobs = torch.log_softmax(logits, dim=-1)
            ids = torch.from_numpy(token_ids[some].astype(np.int64)).to(logits.device)
            own = logprobs.gather(1, ids[:, None]).squeeze(1).tolist()
            values, top = torch.topk(logprobs, min(num_top, logprobs.shape[1]), dim=-1)
            for token_id, logprob, top_ids, top_values in zip(token_ids[some].tolist(), own, top.tolist(), values.tolist(), strict=True):
                entries.append(TokenLogprobs(token_id, logprob, tuple(zip(top_ids, top_values, strict=True))))
        return tuple(entries)
