"""The fake executor: no model, no tensor, yet every answer depends on every byte of the KV blocks that it was given.

A position holds 32 bytes: the hash of its token, its number and the bytes of the position before it, *read through the block
table*. The next token is a function of the last position's bytes and of a checksum over all bytes of the context, read through the
table again. So a stale, swapped, half-copied or badly restored block changes the output. It keeps row state as the real runner does, and speaks
the byte-level vocabulary: ids 0..255 are bytes, 256 ends a sequence. It writes printable ASCII only.
"""

from __future__ import annotations

import hashlib
import math
import time
import zlib
from array import array
from collections.abc import Sequence

from kvd.executor.adapter_files import AdapterFiles
from kvd.executor.adapter_store import PackedAdapter
from kvd.executor.fake_rules import FakeRules, masks_by_row
from kvd.executor.fake_sampling import EOS_TOKEN_ID, VOCAB_SIZE, NothingLeftError, distribution, greedy, noise
from kvd.step import ExecutorOutput, PromptLogprobs, SchedulerOutput, SharedRuns, StartedRow
from kvd.types import BlockId, KvGroup, SamplingParams, TokenLogprobs, unpack_tokens

__all__ = ["EOS_TOKEN_ID", "GROUP", "VOCAB_SIZE", "FakeRunner", "SharedRunError"]

GROUP = "target"
NOT_GIVEN = -1
_POSITION_BYTES = 32
_WRONG_TOKEN_ID = ord("~")
_ACCEPTS = 1 << 32
_REDRAWS = 1 << 33
"""Added to the choice: noise for other ends than the choice's own draws."""


class SharedRunError(Exception):
    """A step's shared runs contradict the rows' tables."""


class _Row:
    """What the executor knows of a sequence."""

    __slots__ = (
        "adapter",
        "block_ids",
        "choice",
        "drafted",
        "failed",
        "is_rejection",
        "num_choices",
        "num_computed",
        "num_prompt_tokens",
        "prompt_logprobs",
        "rules",
        "sampling",
        "token_ids",
    )

    def __init__(self, started: StartedRow) -> None:
        self.token_ids: array[int] = unpack_tokens(started.token_ids)
        self.block_ids: list[int] = list(started.block_ids)
        self.num_computed = started.num_computed
        self.num_prompt_tokens = started.num_prompt_tokens
        self.sampling: SamplingParams = started.sampling
        self.choice = started.choice
        self.num_choices = started.num_choices
        self.prompt_logprobs = started.prompt_logprobs
        self.rules = FakeRules(started)
        self.failed = False
        self.adapter = started.adapter
        self.is_rejection = started.is_rejection
        self.drafted: list[int] = []
        """Ids that stand behind the known tokens in this step; ``NOT_GIVEN`` where the draft model is to say."""


class FakeRunner:
    """Runs steps on a byte pool of ``num_blocks * block_size_tokens * 32`` bytes.

    ``weights_seed`` stands for the weights: another seed is another model, with another fingerprint and other answers.
    A step takes ``step_ms`` milliseconds. A row that computes ``poison_token_id`` fails as one with non-finite logits would.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int = 16,
        *,
        max_rows: int = 64,
        step_ms: float = 0.0,
        weights_seed: int = 0,
        poison_token_id: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.fingerprint = hashlib.sha256(b"kvd.fake.v1:%d:%d" % (block_size_tokens, weights_seed)).digest()
        self._row_bytes = block_size_tokens * _POSITION_BYTES
        self._pool = memoryview(bytearray(num_blocks * self._row_bytes))
        self._num_written = array("H", bytes(2 * num_blocks))
        """Positions of each block that hold what its present owner computed, restored or copied."""
        self._rows: list[_Row | None] = [None] * max_rows
        self._step_s = step_ms / 1000
        self._poison_token_id = poison_token_id
        self._adapters: set[bytes] = set()

    # ------------------------------------------------------------------------------------------ blocks

    def groups(self) -> tuple[KvGroup, ...]:
        return (KvGroup(GROUP, self._row_bytes, self.fingerprint),)

    def read_blocks(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> None:
        """Copy block rows into ``memory``, one after the other."""
        assert group == GROUP
        target = memory.cast("B")
        for index, block_id in enumerate(block_ids):
            target[index * self._row_bytes : (index + 1) * self._row_bytes] = self._block(block_id)

    def write_blocks(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> None:
        """Copy ``memory`` into block rows."""
        assert group == GROUP
        source = memory.cast("B")
        for index, block_id in enumerate(block_ids):
            self._block(block_id)[:] = source[index * self._row_bytes : (index + 1) * self._row_bytes]
            self._num_written[block_id] = self.block_size_tokens

    def _block(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of a pool of {self.num_blocks}")
        return self._pool[block_id * self._row_bytes : (block_id + 1) * self._row_bytes]

    # ------------------------------------------------------------------------------------------ adapters

    max_adapter_bytes = 1 << 30

    def pack_adapter(self, files: AdapterFiles) -> PackedAdapter:
        """Any adapter will do: its digest is what changes the answers."""
        rank = files.config.get("r")
        return PackedAdapter(rank if isinstance(rank, int) else 0, None)

    def install_adapter(self, digest: bytes, _adapter: None) -> None:
        self._adapters.add(digest)

    def remove_adapter(self, digest: bytes) -> None:
        self._adapters.discard(digest)

    # ------------------------------------------------------------------------------------------ a step

    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        """Apply the step's deltas, compute its positions, sample where a row's last known token is reached.

        Raises:
            SharedRunError: the rows of a shared run do not hold the same blocks, or these are not computed yet.
            KeyError, IndexError: a row, a block or a position that is not there.
        """
        began_s = time.monotonic()
        for row in step.released:
            self._rows[row] = None
        self._copy(step)
        work: list[tuple[int, _Row, int]] = []
        for started in step.started:
            if started.adapter and started.adapter not in self._adapters:
                raise KeyError(f"row {started.row} begins with an adapter that is not loaded")
            state = _Row(started)
            self._rows[started.row] = state
            num_full, rest = divmod(started.num_computed, self.block_size_tokens)
            for block_id in started.block_ids[num_full:]:
                self._num_written[block_id] = 0
            if rest:
                self._num_written[started.block_ids[num_full]] = rest  # of a copied block no more is the row's
            work.append((started.row, state, started.num_tokens))
        continued = step.continued
        for index, (row, num_tokens) in enumerate(zip(continued.rows, continued.num_tokens, strict=True)):
            state = self._live(row)
            appended = continued.block_ids[continued.block_offsets[index] : continued.block_offsets[index + 1]]
            state.block_ids.extend(appended)
            for block_id in appended:
                self._num_written[block_id] = 0
            num_draft = continued.num_draft[index] if continued.num_draft else 0
            state.drafted = [NOT_GIVEN] * num_draft
            if continued.given_ids:
                given = continued.given_ids[continued.given_offsets[index] : continued.given_offsets[index + 1]]
                num_known = len(given) - num_draft
                if given:
                    state.token_ids[state.num_computed : state.num_computed + num_known] = array(
                        state.token_ids.typecode, given[:num_known]
                    )
                    state.drafted = given[num_known:]
            work.append((row, state, num_tokens - num_draft))
        self._check_runs(step.shared_runs)
        # A row may follow positions that another row computes in this very step. These lie before its own, so that going by position
        # writes them first, as a layer of the real model writes all rows before it reads any.
        for _, state, num_tokens in sorted(work, key=lambda item: item[1].num_computed):
            self._compute(state, num_tokens)
        told = step.masks if step.late_masks is None else step.late_masks.wait()
        masks = masks_by_row(told) if told is not None else {}
        output = self._sample(step.step, work, masks)
        if (rest_s := self._step_s - (time.monotonic() - began_s)) > 0:
            time.sleep(rest_s)
        return output

    def _copy(self, step: SchedulerOutput) -> None:
        copied = [bytes(self._block(copy.source)) for copy in step.copies]
        for copy, content in zip(step.copies, copied, strict=True):
            self._block(copy.target)[:] = content
            self._num_written[copy.target] = self._num_written[copy.source]
            state = self._rows[copy.row]
            if state is not None and copy.index < len(state.block_ids):
                state.block_ids[copy.index] = copy.target

    def _check_runs(self, runs: SharedRuns) -> None:
        """What a real executor takes on trust: attention over a run is computed once for all of its rows."""
        size = self.block_size_tokens
        for index, (first, end) in enumerate(zip(runs.first_block, runs.end_block, strict=True)):
            rows = runs.rows[runs.row_offsets[index] : runs.row_offsets[index + 1]]
            shared = self._live(rows[0]).block_ids[first:end]
            unwritten = [block_id for block_id in shared if self._num_written[block_id] < size]
            if unwritten or len(shared) < end - first:
                raise SharedRunError(f"blocks {first} to {end} of rows {rows}: {unwritten} are not computed, {len(shared)} are there")
            for row in rows:
                state = self._live(row)
                if state.block_ids[first:end] != shared or state.num_computed < end * size:
                    raise SharedRunError(
                        f"blocks {first} to {end} of row {row}, {state.num_computed} positions computed, are not those of row {rows[0]}"
                    )

    def _live(self, row: int) -> _Row:
        state = self._rows[row]
        if state is None:
            raise KeyError(f"row {row} continues but was never started")
        return state

    def _compute(self, state: _Row, num_tokens: int) -> None:
        size = self.block_size_tokens
        first = state.num_computed
        last = first + num_tokens
        if last > len(state.token_ids) or last > len(state.block_ids) * size:
            raise IndexError(f"position {last - 1}: {len(state.token_ids)} tokens known, {len(state.block_ids)} blocks")
        before = self._position(state, first - 1) if first else b"\0" * _POSITION_BYTES
        for position in range(first, last):
            token_id = state.token_ids[position]
            if token_id == self._poison_token_id:
                state.failed = True
            content = b"%d:%d:" % (token_id, position) + before + state.adapter
            before = hashlib.blake2b(content, digest_size=_POSITION_BYTES, key=self.fingerprint).digest()
            offset = state.block_ids[position // size] * self._row_bytes + position % size * _POSITION_BYTES
            self._pool[offset : offset + _POSITION_BYTES] = before
            self._num_written[state.block_ids[position // size]] = position % size + 1
        state.num_computed = last

    def _position(self, state: _Row, position: int) -> bytes:
        block_index, offset = divmod(position, self.block_size_tokens)
        return bytes(self._block(state.block_ids[block_index])[offset * _POSITION_BYTES : (offset + 1) * _POSITION_BYTES])

    def _context_digest(self, state: _Row, num_tokens: int = 0) -> bytes:
        """Depends on every byte of the first ``num_tokens`` positions, or of all that are computed, read through the block table."""
        num_tokens = num_tokens or state.num_computed
        num_full, rest = divmod(num_tokens, self.block_size_tokens)
        checksum = 0
        for block_id in state.block_ids[:num_full]:
            checksum = zlib.crc32(self._block(block_id), checksum)
        if rest:
            checksum = zlib.crc32(self._block(state.block_ids[num_full])[: rest * _POSITION_BYTES], checksum)
        return self._position(state, num_tokens - 1) + checksum.to_bytes(4, "little")

    # ------------------------------------------------------------------------------------------ sampling

    def _sample(self, step: int, work: list[tuple[int, _Row, int]], masks: dict[int, list[int]]) -> ExecutorOutput:
        output = ExecutorOutput(step, [], [], [])
        failed: list[int] = []
        stuck: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        scores: list[PromptLogprobs] = []
        for row, state, num_tokens in work:
            reached = state.num_computed == len(state.token_ids)
            if state.failed:
                failed.append(row)
                if reached:
                    state.token_ids.append(0)  # keeps a step that is already in flight in range
                continue
            if state.prompt_logprobs is not None and state.num_computed - num_tokens < state.num_prompt_tokens - 1:
                scores.append(self._score(row, state, state.num_computed - num_tokens, state.prompt_logprobs))
            if not reached:
                continue
            state.rules.begin_step(masks.get(row, ()), len(state.token_ids))
            if state.drafted:
                if not self._verify(row, state, output, logprobs):
                    state.failed = True
                    stuck.append(row)
                continue
            digest = self._context_digest(state)
            for choice in range(state.choice, state.choice + state.num_choices):
                try:
                    token_id, logprob = _next_token(state, digest, choice)
                except NothingLeftError:  # for the first choice if for any: all have the same context
                    state.failed = True
                    stuck.append(row)
                    break
                output.rows.append(row)
                output.choices.append(choice)
                output.token_ids.append(token_id)
                logprobs.append(logprob)
            state.token_ids.append(0 if state.failed else output.token_ids[-state.num_choices])
            state.num_choices = 1
        asked = any(entry is not None for entry in logprobs)
        return ExecutorOutput(
            step,
            output.rows,
            output.choices,
            output.token_ids,
            logprobs if asked else None,
            (*failed, *stuck),
            stuck_rows=tuple(stuck),
            prompt_logprobs=tuple(scores),
        )

    def _score(self, row: int, state: _Row, first: int, num_logprobs: int) -> PromptLogprobs:
        """Of the prompt tokens that follow the positions computed from ``first`` on."""
        entries = [
            distribution(self._context_digest(state, position)).described(state.token_ids[position], num_logprobs)
            for position in range(first + 1, min(state.num_computed + 1, state.num_prompt_tokens))
        ]
        return PromptLogprobs(row, first + 1, tuple(entries))

    def _verify(self, row: int, state: _Row, output: ExecutorOutput, logprobs: list[TokenLogprobs | None]) -> bool:
        """Sample after the last known token and after each drafted one that stays. What stands behind these was computed all the same, and is in the pool.

        False: the rules leave nothing to sample after the last known token.
        """
        num_known = len(state.token_ids)
        drafted = list(state.drafted)
        for nth in range(len(drafted) + 1):
            try:
                token_id, logprob = self._verified(state, drafted, nth)
            except NothingLeftError:
                break
            output.rows.append(row)
            output.choices.append(state.choice)
            output.token_ids.append(token_id)
            logprobs.append(logprob)
            state.token_ids.append(token_id)
            if nth == len(drafted) or token_id != drafted[nth] or token_id == self._poison_token_id:
                break
            self._compute(state, 1)
        if rejected := drafted[state.num_computed - num_known :]:
            kept, is_failed = state.token_ids, state.failed
            state.token_ids = kept[: state.num_computed] + array(kept.typecode, [max(0, each) for each in rejected])
            self._compute(state, len(rejected))
            state.token_ids, state.failed = kept, is_failed
        state.num_computed = len(state.token_ids) - 1
        state.drafted = []
        return len(state.token_ids) > num_known

    def _verified(self, state: _Row, drafted: list[int], nth: int) -> tuple[int, TokenLogprobs | None]:
        """The token at the place of the ``nth`` drafted one, if that is its own place, and its log-probability if the row asks. The draft model's proposal is made here, too."""
        digest = self._context_digest(state)
        token_id, logprob = _next_token(state, digest, state.choice)
        if nth == len(drafted):
            return token_id, logprob
        if drafted[nth] == NOT_GIVEN:  # a smaller model is right most of the time
            drafted[nth] = token_id if digest[5] % 4 else _WRONG_TOKEN_ID
        if state.is_rejection and state.sampling.temperature > 0:
            return _accepted_or_another(state, digest, drafted[nth])
        return token_id, logprob


def _accepted_or_another(state: _Row, digest: bytes, drafted: int) -> tuple[int, TokenLogprobs | None]:
    """Rejection sampling of a token that was not drawn: it stays with its probability, else another one is drawn of the rest."""
    sampling, position = state.sampling, len(state.token_ids)
    change = state.rules.at(state.token_ids)
    said = distribution(digest)
    allowed = said if change is None else said.adjusted(change)
    probability = allowed.probabilities(sampling.temperature).get(drafted, 0.0)
    token_id = drafted
    if noise(sampling.seed, state.choice + _ACCEPTS, position) >= probability:
        rest = allowed.adjusted(lambda token_id, logprob: -math.inf if token_id == drafted else logprob)
        token_id = rest.draw(sampling.temperature, noise(sampling.seed, state.choice + _REDRAWS, position))
    return token_id, None if sampling.num_logprobs is None else said.described(token_id, sampling.num_logprobs)


def _next_token(state: _Row, digest: bytes, choice: int) -> tuple[int, TokenLogprobs | None]:
    """Greedy: a function of the context alone. Else a draw, by noise that the seed, the choice and the position give. Its log-probability, if the row asks."""
    sampling, position = state.sampling, len(state.token_ids)
    change = state.rules.at(state.token_ids)
    is_greedy = sampling.temperature <= 0
    if is_greedy and change is None and sampling.num_logprobs is None:
        return greedy(digest), None
    said = distribution(digest)
    allowed = said if change is None else said.adjusted(change)
    token_id = allowed.greedy if is_greedy else allowed.draw(sampling.temperature, noise(sampling.seed, choice, position))
    return token_id, None if sampling.num_logprobs is None else said.described(token_id, sampling.num_logprobs)
