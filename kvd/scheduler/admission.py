"""What is refused at once, with the numbers."""

from __future__ import annotations

from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager
from kvd.commands import RequestFailed, Submit
from kvd.config import SchedulerConfig
from kvd.scheduler.choosing import num_sequences, problem_of
from kvd.types import MAX_PRIORITY, MIN_PRIORITY, TOKEN_BYTES, ErrorCode


def refuse(command: Submit, namespace: Namespace, config: SchedulerConfig, cache: CacheManager, max_model_len: int) -> RequestFailed | None:
    """Why a request can never be served, or None."""
    num_prompt = len(command.token_ids) // TOKEN_BYTES
    most_choices = min(config.max_choices, config.max_running)
    problem = ""
    if num_prompt == 0 or len(command.token_ids) % TOKEN_BYTES:
        problem = f"the prompt has {len(command.token_ids)} bytes: token ids are packed in four bytes each, and there is at least one"
    elif command.max_tokens < 1:
        problem = f"max_tokens is {command.max_tokens}, it must be at least 1"
    elif not 1 <= command.num_choices <= most_choices:
        problem = f"{command.num_choices} choices are asked for, 1 to {most_choices} are possible"
    elif not MIN_PRIORITY <= command.priority <= MAX_PRIORITY:
        problem = f"priority is {command.priority}, it must be from {MIN_PRIORITY} to {MAX_PRIORITY}"
    elif command.deadline_s < 0 or command.queue_timeout_s < 0:
        problem = f"deadline_s is {command.deadline_s} and queue_timeout_s {command.queue_timeout_s}: neither may be negative"
    problem = problem or problem_of(command, most_choices)
    if problem:
        return RequestFailed(command.request_id, ErrorCode.BAD_REQUEST, problem)
    if num_prompt >= max_model_len:
        message = f"the prompt has {num_prompt} tokens; with one output token {max_model_len} fit (max_model_len)"
        return RequestFailed(command.request_id, ErrorCode.PROMPT_TOO_LONG, message)
    max_tokens = clamp_max_tokens(command, namespace, cache, max_model_len)
    num_needed = blocks_needed(num_prompt, max_tokens, num_sequences(command), cache.block_size_tokens)
    num_usable = usable_blocks(command, namespace, cache, num_needed)
    if num_needed > num_usable:
        message = (
            f"the request needs up to {num_needed} KV blocks of {cache.block_size_tokens} tokens; "
            f"the pool has {cache.num_blocks}, of which pins leave {num_usable}"
        )
        return RequestFailed(command.request_id, ErrorCode.KV_CAPACITY, message)
    return None


def clamp_max_tokens(command: Submit, namespace: Namespace, cache: CacheManager, max_model_len: int) -> int:
    """Output tokens that fit behind the prompt; where the client named no number, also into the blocks that pins leave (at least one)."""
    num_prompt, size = len(command.token_ids) // TOKEN_BYTES, cache.block_size_tokens
    max_tokens = min(command.max_tokens, max_model_len - num_prompt)
    if not command.may_shorten:
        return max_tokens
    num_needed = blocks_needed(num_prompt, max_tokens, num_sequences(command), size)
    num_usable = usable_blocks(command, namespace, cache, min(num_needed, cache.num_blocks))
    if num_needed <= num_usable:
        return max_tokens
    num_shared = num_prompt // size
    num_own = max(0, num_usable - num_shared) // num_sequences(command)
    return max(1, min(max_tokens, (num_shared + num_own) * size - num_prompt + 1))


def blocks_needed(num_prompt: int, max_tokens: int, num_choices: int, block_size_tokens: int) -> int:
    """Blocks that a request holds at its end: the prompt's full ones shared, the rest for each choice. The last token is never computed."""
    num_shared = num_prompt // block_size_tokens
    num_in_all = -(-(num_prompt + max_tokens - 1) // block_size_tokens)
    return num_shared + num_choices * (num_in_all - num_shared)


def usable_blocks(command: Submit, namespace: Namespace, cache: CacheManager, num_needed: int) -> int:
    """Blocks that pins leave to a request, its own pinned prefix included."""
    num_usable = cache.num_blocks - cache.pinned_blocks
    if num_usable < num_needed <= cache.num_blocks:
        num_usable += sum(1 for node in cache.match(command.token_ids, namespace).nodes if node.num_pins)
    return num_usable


def lack_of_blocks(num_tokens: int, cache: CacheManager) -> str:
    """Why a sequence of so many tokens fails that has the pool to itself."""
    return (
        f"{num_tokens} tokens need {cache.blocks_for(num_tokens)} KV blocks; "
        f"of {cache.num_blocks} blocks {cache.pinned_blocks} are pinned, and nobody else holds any"
    )
