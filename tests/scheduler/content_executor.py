"""A model executor for tests: what it answers depends on every byte of KV that it is given, and it says what it read.

A position's content is a hash chain over the tokens up to it, each link read through the block table from a pool of blocks. A sampled token is a function
of the last link and the choice; its ``logprob`` carries a digest of the row's whole context, so that a reader of the stream can prove that
nothing stale, foreign or half-copied was ever read.
"""

from __future__ import annotations

import hashlib

from kvd.step import ExecutorOutput, SchedulerOutput
from kvd.types import TokenLogprobs, unpack_tokens

ROOT = b"root"


def link(before: bytes, token_id: int, position: int) -> bytes:
    return hashlib.blake2b(b"%d:%d:" % (token_id, position) + before, digest_size=12).digest()


def digest_of(links: list[bytes]) -> float:
    return float(int.from_bytes(hashlib.blake2b(b"".join(links), digest_size=6).digest(), "big"))


def token_of(last: bytes, choice: int, vocab: int, banned=frozenset()) -> int:
    drawn = hashlib.blake2b(b"%d:" % choice + last, digest_size=4).digest()
    allowed = [token for token in range(vocab) if token not in banned]
    return allowed[int.from_bytes(drawn, "big") % len(allowed)]


def reference(prompt: list[int], choice: int, *, max_tokens: int, vocab: int, stop=(), min_tokens: int = 0) -> list[tuple[int, float]]:
    """What a choice must say, token by token, with the digest of the context of each."""
    links: list[bytes] = []
    tokens = list(prompt)
    for position, token in enumerate(tokens):
        links.append(link(links[-1] if links else ROOT, token, position))
    said = []
    while len(said) < max_tokens:
        banned = frozenset(stop) if len(said) < min_tokens else frozenset()
        token = token_of(links[-1], choice, vocab, banned)
        said.append((token, digest_of(links)))
        if token in stop:
            break
        tokens.append(token)
        links.append(link(links[-1], token, len(tokens) - 1))
    return said


class _Row:
    def __init__(self, started):
        self.tokens = list(unpack_tokens(started.token_ids))
        self.blocks = list(started.block_ids)
        self.num_computed = started.num_computed
        self.num_prompt = started.num_prompt_tokens
        self.choice, self.num_choices = started.choice, started.num_choices
        self.banned, self.min_tokens = frozenset(started.banned_token_ids), started.min_tokens
        self.failed = False
        self.drafted: list[int] = []


class ContentExecutor:
    def __init__(self, num_blocks: int, block_size: int, max_rows: int, vocab: int = 2):
        self.size, self.vocab, self.max_rows = block_size, vocab, max_rows
        self.pool = [[b"?"] * block_size for _ in range(num_blocks)]
        self.rows: dict[int, _Row] = {}
        self.fail_row = None
        """A function of the step's row numbers that names one to fail."""
        self.num_executed = 0
        self.largest_step = 0
        self.num_drafted = self.num_accepted = 0
        self.short: list[tuple[int, int]] = []
        self.num_shared_blocks = 0
        """Blocks of shared runs, over all steps."""

    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        self._apply(step)
        work = [(started.row, started.num_tokens) for started in step.started]
        work += [(row, count - missing) for row, count, missing in self._draft(step.continued)]
        assert len({row for row, _ in work}) == len(work), "a row runs twice in a step"
        assert all(0 <= row < self.max_rows for row, _ in work)
        self.num_executed += 1
        self.largest_step = max(self.largest_step, sum(count for _, count in work))
        if self.fail_row is not None:
            row = self.fail_row([row for row, _ in work])
            if row is not None:
                self.rows[row].failed = True
            self.fail_row = None
        self._check_runs(step.shared_runs, work)
        self._compute(work)
        return self._sample(step, work)

    def _check_runs(self, runs, work):
        """The rows of a run hold the same blocks, and nobody writes these in this step or a later one."""
        written = set()
        for row, count in work:
            state = self.rows[row]
            written.update(state.blocks[state.num_computed // self.size : -(-(state.num_computed + count) // self.size)])
        for index, (first, end) in enumerate(zip(runs.first_block, runs.end_block, strict=True)):
            rows = runs.rows[runs.row_offsets[index] : runs.row_offsets[index + 1]]
            assert len(set(rows)) == len(rows) >= 2
            shared = self.rows[rows[0]].blocks[first:end]
            assert len(shared) == end - first > 0
            assert written.isdisjoint(shared), "a shared run is written"
            self.num_shared_blocks += len(shared)
            for row in rows:
                state = self.rows[row]
                assert state.blocks[first:end] == shared, "the rows of a run hold other blocks"
                assert state.num_computed >= end * self.size, "a row of a run has not computed it"
                contents = [self._read(state, position) for position in range(end * self.size)]
                expected = [b"root"]
                for position, token in enumerate(state.tokens[: end * self.size]):
                    expected.append(link(expected[-1], token, position))
                assert b"nan" in contents or contents == expected[1:], "a shared run holds other tokens' content"

    def _apply(self, step):
        for row in step.released:
            del self.rows[row]
        copied = [list(self.pool[copy.source]) for copy in step.copies]
        for copy, content in zip(step.copies, copied, strict=True):
            self.pool[copy.target] = content
            if copy.row in self.rows:
                assert self.rows[copy.row].blocks[copy.index] == copy.source
                self.rows[copy.row].blocks[copy.index] = copy.target
        for started in step.started:
            assert started.row not in self.rows, "a row starts without its predecessor's release"
            self.rows[started.row] = _Row(started)
        columns = step.continued
        assert len(columns.rows) == len(columns.num_tokens) == len(columns.block_offsets) - 1
        for index, row in enumerate(columns.rows):
            self.rows[row].blocks += columns.block_ids[columns.block_offsets[index] : columns.block_offsets[index + 1]]

    def _draft(self, columns):
        """Rows, their tokens, and how many of these their draft model does not propose."""
        for index, (row, count) in enumerate(zip(columns.rows, columns.num_tokens, strict=True)):
            state = self.rows[row]
            num_draft = columns.num_draft[index] if columns.num_draft else 0
            given = columns.given_ids[columns.given_offsets[index] : columns.given_offsets[index + 1]] if columns.given_ids else []
            assert len(given) in (0, count)
            num_known = count - num_draft
            assert given[:num_known] in ([], state.tokens[state.num_computed :]), "given other tokens than it has"
            state.drafted = given[num_known:]
            if num_draft and not given:
                state.drafted = [0] * (num_draft - len(state.tokens) % 2)
            self.num_drafted += len(state.drafted)
            if len(state.drafted) < num_draft:
                self.short.append((row, len(state.drafted)))
            assert state.num_computed + num_known == len(state.tokens) or not num_draft, "drafts follow the last known token"
            yield row, count, num_draft - len(state.drafted)

    def _compute(self, work):
        positions = []
        for row, count in work:
            state = self.rows[row]
            assert count >= 1
            assert state.num_computed + count <= len(state.tokens) + len(state.drafted), "a position without a token"
            assert state.num_computed + count <= len(state.blocks) * self.size, "a position without a block"
            positions += [(position, row) for position in range(state.num_computed, state.num_computed + count)]
            state.num_computed += count
        for position, row in sorted(positions):  # within a layer, writes precede reads
            state = self.rows[row]
            before = self._read(state, position - 1) if position else ROOT
            state.failed = state.failed or before == b"nan"  # as in a model, it spreads to whoever reads it
            content = b"nan" if state.failed else link(before, (state.tokens + state.drafted)[position], position)
            self.pool[state.blocks[position // self.size]][position % self.size] = content

    def _read(self, state, position):
        return self.pool[state.blocks[position // self.size]][position % self.size]

    def _sample(self, step, work):
        out = ExecutorOutput(step.step, [], [], [])
        logprobs, failed = [], []
        for row, _ in work:
            state = self.rows[row]
            if state.drafted:
                self._verify(row, state, out, logprobs)
                continue
            if state.failed:
                failed.append(row)
            if state.num_computed < len(state.tokens):
                continue
            links = [self._read(state, position) for position in range(state.num_computed)]
            banned = state.banned if len(state.tokens) - state.num_prompt < state.min_tokens else frozenset()
            for choice in range(state.choice, state.choice + state.num_choices):
                token = token_of(links[-1], choice, self.vocab, banned)
                if choice == state.choice:
                    own = token
                if not state.failed:
                    out.rows.append(row)
                    out.choices.append(choice)
                    out.token_ids.append(token)
                    logprobs.append(TokenLogprobs(token, digest_of(links)))
            state.tokens.append(own)
            state.num_choices = 1
        short, self.short = tuple(self.short), []
        return ExecutorOutput(step.step, out.rows, out.choices, out.token_ids, logprobs, tuple(failed), short_drafts=short)

    def _verify(self, row, state, out, logprobs):
        """What follows the last known token and each drafted one that agrees; where content is not finite, what comes before."""
        known = len(state.tokens)
        for nth, drafted in enumerate([*state.drafted, None]):
            links = [self._read(state, position) for position in range(known + nth)]
            if b"nan" in links:
                break
            banned = state.banned if known + nth - state.num_prompt < state.min_tokens else frozenset()
            token = token_of(links[-1], state.choice, self.vocab, banned)
            out.rows.append(row)
            out.choices.append(state.choice)
            out.token_ids.append(token)
            logprobs.append(TokenLogprobs(token, digest_of(links)))
            state.tokens.append(token)
            if token != drafted:
                break
        self.num_accepted += max(0, len(state.tokens) - known - 1)
        state.drafted, state.failed = [], False
        state.num_computed = len(state.tokens) - 1
