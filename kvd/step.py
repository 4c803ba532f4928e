"""One engine step as data: what the scheduler asks of the executor, and what it gets back.

No prefill and no decode phase: a row computes ``num_tokens`` further positions, whatever they are. A *row* is one
sequence (one choice of one request) that the executor keeps state for, named by a small integer that the scheduler hands
out and takes back with ``released``. The executor applies a step in this order: released, copies, started, continued, the
forward pass, sampling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.types import BlockId, PackedTokens, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StartedRow:
    """A row that begins, or begins again after a preemption: everything the executor must know of it.

    ``token_ids`` holds every known token (prompt and, after a preemption or a fork, the output so far); the first
    ``num_computed`` of them already have KV in ``block_ids``. The step computes the next ``num_tokens`` positions. If these reach the
    last known token, one token is sampled for each of ``num_choices`` choices, numbered from ``choice``; else the row is a
    middle chunk and samples nothing.
    """

    row: int
    token_ids: PackedTokens
    num_prompt_tokens: int
    num_computed: int
    num_tokens: int
    block_ids: tuple[BlockId, ...]
    sampling: SamplingParams
    choice: int = 0
    num_choices: int = 1
    banned_token_ids: tuple[int, ...] = ()
    """Ids that may not be sampled while fewer than ``min_tokens`` tokens are out (end-of-sequence and stop ids)."""
    min_tokens: int = 0
    adapter: bytes = b""
    """Digest of the LoRA adapter that the row runs with; empty: the base model."""
    prompt_logprobs: int | None = None
    """As ``SamplingParams.num_logprobs``, for the prompt's tokens but the first; such a row begins with nothing computed."""
    is_rejection: bool = False
    """Drafted tokens are accepted by rejection sampling, else by coupling."""
    drafts: bool = False
    """The draft model will be asked to propose tokens for the row: it follows the row's prompt, so that nothing is missing then."""


@dataclass(frozen=True, slots=True)
class ContinuedRows:
    """The rows that go on, as columns of equal length.

    ``block_ids[block_offsets[i]:block_offsets[i + 1]]`` are the blocks appended to the table of ``rows[i]`` since its last step.
    A row whose known tokens are all computed continues with the token that it sampled last, which the executor knows, unless it is given another.

    The last ``num_draft[i]`` of the row's ``num_tokens[i]`` positions hold *drafted* tokens: given ones, or else what the draft model proposes. The row then samples
    after each of them and after its last known token, in order, and keeps of these 1 to ``num_draft[i] + 1`` tokens: those that agree with the draft,
    and one more. With m kept, it has m known tokens more than before the drafts, all but the last of them computed. Where numbers are not finite it keeps what comes
    before, perhaps nothing, and does not fail: without drafts it may go on.
    """

    rows: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    block_offsets: list[int] = field(default_factory=lambda: [0])
    block_ids: list[BlockId] = field(default_factory=list)
    num_draft: list[int] = field(default_factory=list)
    """Empty where no row drafts."""
    given_offsets: list[int] = field(default_factory=list)
    """Empty where no row is given tokens; else ``given_ids[given_offsets[i]:given_offsets[i + 1]]``, none or ``num_tokens[i]`` of them, take the places from the row's first
    uncomputed position on, whatever it sampled."""
    given_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens rows may sample in a step: ``counts[i]`` masks for ``rows[i]``, one for each token that it may sample, in order.

    A mask is ``num_words`` little-endian u32 of ``words``; bit j of word w says whether token 32 w + j may be sampled. Nobody writes to ``words`` any more.
    """

    rows: list[int]
    counts: list[int]
    num_words: int
    words: bytes | bytearray | memoryview


class LateMasks:
    """The masks of a step that was planned before all that its rows sampled earlier was known: told once, while the step computes, before it samples.

    They come when the steps before it have been collected, so that nobody who waits for them keeps these from ending.
    """

    __slots__ = ("_lock", "_masks", "_take", "_told", "counts", "rows")

    def __init__(self, rows: list[int], counts: list[int]) -> None:
        self.rows = rows
        self.counts = counts
        """As in ``TokenMasks``."""
        self._lock = threading.Lock()
        self._told = threading.Event()
        self._masks: TokenMasks | None = None
        self._take: Callable[[TokenMasks], None] | None = None

    def tell(self, masks: TokenMasks) -> None:
        """The masks, of the same rows."""
        with self._lock:
            self._masks, take = masks, self._take
        self._told.set()
        if take is not None:
            take(masks)

    def when_told(self, take: Callable[[TokenMasks], None]) -> None:
        """Have ``take`` called once, at once if they were told, else by the thread that tells them; it must not wait for anything."""
        with self._lock:
            masks = self._masks
            if masks is None:
                self._take = take
        if masks is not None:
            take(masks)

    def wait(self) -> TokenMasks:
        """Sleep until they are told."""
        self._told.wait()
        assert self._masks is not None, "they were told"
        return self._masks


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: copy all of block ``source`` to ``target`` in every KV group, before the forward pass.

    ``row`` is the row whose table held ``source`` at ``index`` and holds ``target`` from now on.
    """

    source: BlockId
    target: BlockId
    index: int
    row: int


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """Which live rows hold the same blocks, as columns; the same object from step to step while nothing changes.

    Run i: the tables of ``rows[row_offsets[i]:row_offsets[i + 1]]``, at least two, hold the same blocks at ``first_block[i]:end_block[i]``. All of these were
    computed before the step, and every position that one of the rows still computes comes after them. Runs of one row are disjoint and ascend; a row of a run
    may be absent from the step. So attention over a run can be computed once for all queries of its rows (ChunkAttention, Ye et al. 2024; Hydragen, Juravsky
    et al. 2024; several levels as in FlashInfer's cascade, Ye et al. 2025), whether it is worth it is for the executor to say.
    """

    first_block: list[int] = field(default_factory=list)
    end_block: list[int] = field(default_factory=list)
    row_offsets: list[int] = field(default_factory=lambda: [0])
    rows: list[int] = field(default_factory=list)


NO_SHARED_RUNS = SharedRuns()

TILE_TOKENS = 64
"""Where the executor names no other: attention reduces over tiles of so many positions, at absolute places, so that runs are told in whole ones."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. ``fills`` are the cache's handles of blocks that this step completes; the executor passes them by."""

    step: int
    started: tuple[StartedRow, ...]
    continued: ContinuedRows
    released: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    fills: tuple[object, ...] = ()
    shared_runs: SharedRuns = NO_SHARED_RUNS
    masks: TokenMasks | None = None
    late_masks: LateMasks | None = None
    """In the place of ``masks``."""

    @property
    def num_chunk_tokens(self) -> int:
        """Positions of rows that compute more than one, or their first: prompts, mostly. What rows draft is not among them."""
        continued = self.continued
        num_drafting = sum(count + 1 for count in continued.num_draft if count)
        return sum(row.num_tokens for row in self.started) + sum(count for count in continued.num_tokens if count > 1) - num_drafting


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of row ``row``: log-probabilities of the known tokens at positions ``first_position`` and on, each given those before it."""

    row: int
    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ExecutorOutput:
    """What a step sampled, as columns: entry i is ``token_ids[i]`` of choice ``choices[i]`` in row ``rows[i]``.

    A row may have several entries: one for each choice at its first sample, or one for each token kept where it drafted. ``logprobs`` is None when no row asked, else has one
    entry (or None) a sample. ``failed_rows`` had non-finite logits, or are ``stuck_rows``: they have no entries.
    """

    step: int
    rows: list[int]
    choices: list[int]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    failed_rows: tuple[int, ...] = ()
    stuck_rows: tuple[int, ...] = ()
    """Those of ``failed_rows`` whose rules (allowed and banned tokens, bad words, masks) left nothing to sample, in this step."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    short_drafts: tuple[tuple[int, int], ...] = ()
    """(row, tokens that the draft model proposed) of rows for which it proposed fewer than asked; the others of the row's positions were not computed."""
