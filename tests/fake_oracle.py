"""What the fake executor must answer: computed by a lone runner with a pool of its own, without scheduler, cache, store or socket."""

from __future__ import annotations

from kvd.executor.fake import EOS_TOKEN_ID, FakeRunner
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow
from kvd.types import BlockId, SamplingParams, pack_tokens


def expected_tokens(
    prompt: bytes | list[int], num_tokens: int, *, sampling: SamplingParams | None = None, choice: int = 0, ignore_eos: bool = True
) -> list[int]:
    """The output of one choice: at most ``num_tokens`` ids, ending with the end-of-sequence id unless that is ignored."""
    token_ids = list(prompt)
    num_blocks = (len(token_ids) + num_tokens) // 16 + 1
    runner = FakeRunner(num_blocks, 16, max_rows=1)
    blocks = tuple(BlockId(index) for index in range(num_blocks))
    started = StartedRow(
        row=0,
        token_ids=pack_tokens(token_ids),
        num_prompt_tokens=len(token_ids),
        num_computed=0,
        num_tokens=len(token_ids),
        block_ids=blocks,
        sampling=sampling or SamplingParams(temperature=0.0),
        choice=choice,
    )
    output = runner.execute(SchedulerOutput(0, (started,), ContinuedRows()))
    answer = list(output.token_ids)
    while len(answer) < num_tokens and (ignore_eos or answer[-1] != EOS_TOKEN_ID):
        output = runner.execute(SchedulerOutput(len(answer), (), ContinuedRows([0], [1], [0, 0], [])))
        answer += output.token_ids
    return answer
