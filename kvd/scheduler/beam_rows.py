"""The beams of a request as sequences: who answers for which hypothesis, and what a step of the search does to rows and blocks.

Every open beam is a sequence with a row, stepwise. When all of them have answered with their most likely tokens, the rule says which beam goes on with
what. The first continuation of a beam keeps its row and its table; each further one shares the table's blocks as a fork, of which only the
block that is written next is copied; beams that nobody continues leave at once. Sharing by forks and copy-on-write is that of Kwon et al., "Efficient memory
management for large language model serving with PagedAttention" (2023).
"""

from __future__ import annotations

from collections import Counter

from kvd.cache.manager import CacheManager
from kvd.scheduler.beams import BeamRule, Finished
from kvd.scheduler.ending import Endings
from kvd.scheduler.held import HeldChoice
from kvd.scheduler.request import Beams, Leaving, Request, Sequence
from kvd.scheduler.roster import Roster
from kvd.types import TOKEN_BYTES, SamplingParams, TokenLogprobs


def begin_search(request: Request) -> None:
    """Make a new request's one sequence the beginning of its search, if it asks for one."""
    command = request.command
    if command.beam is None:
        return
    rule = BeamRule(
        command.beam,
        stop_token_ids=request.stop_token_ids,
        max_tokens=request.limit_tokens - request.num_prompt_tokens,
        min_tokens=command.min_tokens,
        num_logprobs=command.sampling.num_logprobs,
    )
    (prompt,) = request.sequences
    prompt.is_stepwise = True
    prompt.num_slots = command.beam.width
    request.beams = Beams(rule, prompt)
    request.sampling = SamplingParams(temperature=0.0, num_logprobs=rule.num_candidates)


def waiting_beams(request: Request) -> list[Sequence]:
    """The beams that wait for seats, which they take together or not at all; none while others of them have still to give theirs up."""
    if any(each.leaving is not None and each.leaving is not Leaving.OVER for each in request.sequences):
        return []
    return [each for each in request.sequences if each.table is None and not each.is_over]


class BeamSteps:
    """Carries out what the rules say."""

    def __init__(self, cache: CacheManager, roster: Roster, endings: Endings, counters: Counter[str]) -> None:
        self._cache = cache
        self._roster = roster
        self._endings = endings
        self._counters = counters

    def take(self, sequence: Sequence, answer: TokenLogprobs | None) -> None:
        """A beam's row has answered; with the last one of a step the search goes on, or is over."""
        request = sequence.request
        beams = request.beams
        assert beams is not None, "a beam belongs to a search"
        assert answer is not None, "a beam's row asks for log-probabilities"
        beams.answers[sequence] = answer.top
        if len(beams.answers) < len(beams.sequences):
            return
        places = beams.rule.advance([beams.answers[each] for each in beams.sequences])
        beams.answers.clear()
        if beams.rule.is_over:
            self._endings.end_search(request, [_held(finished) for finished in beams.rule.finished])
        else:
            self._go_on(beams, places)

    def _go_on(self, beams: Beams, places: list[int]) -> None:
        before, beams.sequences = beams.sequences, []
        for place in dict.fromkeys(places):
            self._record(before[place])
        kept: set[int] = set()
        for place in places:
            sequence = before[place]
            if place in kept:
                sequence = self._roster.branch(sequence, beams.num_begun)
                beams.num_begun += 1
            kept.add(place)
            beams.sequences.append(sequence)
        for place, sequence in enumerate(before):
            if place not in kept:
                self._roster.retire(sequence, Leaving.OVER)
        for sequence, hypothesis in zip(beams.sequences, beams.rule.open, strict=True):
            sequence.tokens += hypothesis.token_id.to_bytes(TOKEN_BYTES, "little")
            sequence.num_known += 1
            sequence.num_total = sequence.num_known
            if sequence.row >= 0:
                sequence.given = (hypothesis.token_id,)
        self._count(beams.sequences)

    def _record(self, sequence: Sequence) -> None:
        """Before a fork, so that the full blocks are shared as the tree's."""
        if sequence.num_known % self._cache.block_size_tokens == 0 and sequence.table is not None:
            self._cache.record(sequence.table, sequence.tokens, sequence.num_known)

    def _count(self, sequences: list[Sequence]) -> None:
        tables = [sequence.table.block_ids for sequence in sequences if sequence.table is not None]
        num_blocks = sum(map(len, tables))
        self._counters["beam_blocks"] += num_blocks
        self._counters["beam_blocks_saved"] += num_blocks - len(set().union(*tables))


def _held(finished: Finished) -> HeldChoice:
    path = finished.hypothesis.path()
    return HeldChoice(
        token_ids=bytearray(b"".join(step.token_id.to_bytes(TOKEN_BYTES, "little") for step in path)),
        logprobs=[step.entry for step in path if step.entry is not None],
        reason=finished.reason,
        cumulative_logprob=finished.hypothesis.logprob,
        score=finished.score,
    )
