"""What a step's outcome means: tokens are recorded and told, choices end or fork, rows fail."""

from __future__ import annotations

from collections import Counter

from kvd.cache.manager import BlockTable, CacheManager, Node
from kvd.scheduler.beam_rows import BeamSteps
from kvd.scheduler.constraints import Constraints
from kvd.scheduler.ending import Endings
from kvd.scheduler.request import Leaving, Sequence
from kvd.scheduler.roster import Roster
from kvd.step import ExecutorOutput, PromptLogprobs, SchedulerOutput
from kvd.types import TOKEN_BYTES, ErrorCode, FinishReason, TokenLogprobs

_STUCK = "what the request allows and forbids (allowed_token_ids, banned_token_ids, bad_words, min_tokens, constraint) leaves no token to go on with"


class Outcomes:
    """Applies what the executor computed and sampled, step by step in their order."""

    def __init__(self, cache: CacheManager, roster: Roster, endings: Endings, constraints: Constraints, counters: Counter[str]) -> None:
        self._cache = cache
        self._roster = roster
        self._endings = endings
        self._constraints = constraints
        self._beam_steps = BeamSteps(cache, roster, endings, counters)

    def apply(self, out: ExecutorOutput, fills: list[Node]) -> None:
        """A step that filled ``fills`` is done."""
        roster = self._roster
        self._fail_rows(out.failed_rows, out.stuck_rows)
        self._cache.complete_fill(fills)
        roster.computing.difference_update(fills)
        for scores in out.prompt_logprobs:
            self._tell_scores(scores)
        logprobs = out.logprobs if out.logprobs is not None else [None] * len(out.rows)
        for row, choice, token_id, logprob in zip(out.rows, out.choices, out.token_ids, logprobs, strict=True):
            sequence = roster.rows[row]
            assert sequence is not None, "a row outlives its steps"
            if sequence.request.is_over or sequence.leaving is Leaving.REPLANNED:
                continue
            if choice != sequence.choice:
                prompt = sequence.tokens[: sequence.request.num_prompt_tokens * TOKEN_BYTES]
                sequence = roster.fork(sequence, choice, prompt)
                sequence.num_total += 1
            elif sequence.is_over:
                continue
            if sequence.request.beams is not None:
                self._beam_steps.take(sequence, logprob)
            else:
                self._append(sequence, token_id, logprob)

    def fail(self, step: SchedulerOutput, fills: list[Node], message: str) -> None:
        """The executor raised in a step: its requests fail, and every block that it was filling leaves the tree."""
        roster = self._roster
        roster.withdraw(fills)
        roster.computing.difference_update(fills)
        for row in (*(started.row for started in step.started), *step.continued.rows):
            sequence = roster.rows[row]
            if sequence is not None and not sequence.request.is_over:
                self._endings.fail(sequence.request, ErrorCode.ENGINE_ERROR, message)

    def _tell_scores(self, scores: PromptLogprobs) -> None:
        """Log-probabilities of a chunk of a prompt; what was told before a preemption is not told again."""
        sequence = self._roster.rows[scores.row]
        assert sequence is not None, "a row outlives its steps"
        request = sequence.request
        if request.is_over or sequence.leaving is Leaving.REPLANNED:
            return
        num_told = request.num_scored + 1 - scores.first_position
        assert num_told >= 0, "a prompt is scored without gaps"
        new = scores.logprobs[num_told:]
        if new:
            self._endings.tell_prompt(request, request.num_scored + 1, new)
            request.num_scored += len(new)

    def _append(self, sequence: Sequence, token_id: int, logprob: TokenLogprobs | None) -> None:
        """A sampled token of a choice: told, recorded, and perhaps its last."""
        request = sequence.request
        num_known = sequence.num_known
        if num_known % self._cache.block_size_tokens == 0 and sequence.table is not None:
            self._cache.record(sequence.table, sequence.tokens, num_known)
        packed = token_id.to_bytes(TOKEN_BYTES, "little")
        sequence.tokens += packed
        sequence.num_known = num_known + 1
        first_index = num_known - request.num_prompt_tokens
        self._endings.tell_token(sequence, first_index, packed, logprob)
        if token_id in request.stop_token_ids and first_index >= request.command.min_tokens:
            self._endings.end_choice(sequence, FinishReason.STOP)
        elif sequence.constraint is not None and self._constraints.end_if_over(sequence, token_id):
            return
        elif num_known + 1 >= request.limit_tokens:
            self._endings.end_choice(sequence, FinishReason.LENGTH)

    def _fail_rows(self, rows: tuple[int, ...], stuck: tuple[int, ...]) -> None:
        """Non-finite logits, or nothing to sample: the requests of these rows fail alone; nothing that the rows were filling is kept, nor what others computed over it.

        A row that read blocks of another failed row, in this step or the one before, is none of them: it is planned anew.
        """
        failed: dict[BlockTable, Sequence] = {}
        for row in rows:
            sequence = self._roster.rows[row]
            assert sequence is not None, "a row outlives its steps"
            assert sequence.table is not None, "a row has blocks"
            if sequence.leaving is not Leaving.REPLANNED:
                failed[sequence.table] = sequence
        own = [sequence for table, sequence in failed.items() if failed.keys().isdisjoint(self._cache.awaited(table))]
        for sequence in own:
            assert sequence.table is not None, "it was there a moment ago"
            self._roster.withdraw(list(sequence.table.fills))
            if not (sequence.is_over or sequence.request.is_over):  # what a row does beyond its choice's end is nobody's
                if sequence.row in stuck:
                    self._endings.fail(sequence.request, ErrorCode.BAD_REQUEST, _STUCK)
                else:
                    message = "the model computed logits that are not finite for this request"
                    self._endings.fail(sequence.request, ErrorCode.NONFINITE_LOGITS, message)
