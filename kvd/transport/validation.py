"""What a request may ask for: ranges, counts and names, each refusal naming the field and what is allowed."""

from __future__ import annotations

import math

from kvd_client.protocol.messages import ID_BYTES, Forget, Generate, Pin, Sampling

from kvd.cache.tenants import MAX_CACHE_SALT_BYTES, PIN_NAME
from kvd.transport.choosing import check_choosing
from kvd.transport.constraining import check_constraint, has_source
from kvd.transport.drafting import check_speculation
from kvd.transport.errors import RequestError, bad_request
from kvd.transport.output_rules import check_output_rules, check_truncatable
from kvd.types import MAX_PRIORITY, MIN_PRIORITY, ErrorCode

INPUTS = ("text", "ids", "messages")
MAX_LOGPROBS = 20
MAX_TENANT_CHARS = 64
MAX_TTL_S = 366 * 86400
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_SEED = (1 << 64) - 1


def check_id(field: str, value: bytes) -> None:
    """Request and operation ids have a fixed length."""
    if len(value) != ID_BYTES:
        raise bad_request(f"{field} has {len(value)} bytes; it must have {ID_BYTES}")


def check_generate(message: Generate, *, max_choices: int, max_stop_strings: int, vocab_size: int) -> None:
    """Everything about a ``generate`` that can be told without its prompt.

    Raises:
        RequestError: ``bad_request``, naming the field and its range.
    """
    _check_input(message.input)
    _check_range("n", message.n, 1, max_choices)
    if message.max_tokens is not None:
        _check_at_least("max_tokens", message.max_tokens, 1)
    _check_at_least("min_tokens", message.min_tokens, 0)
    if message.max_tokens is not None and message.min_tokens > message.max_tokens:
        raise bad_request(f"min_tokens is {message.min_tokens}; it must not exceed max_tokens ({message.max_tokens})")
    _check_at_least("credit", message.credit, 0)
    if len(message.stop) > max_stop_strings:
        raise bad_request(f"stop has {len(message.stop)} strings; at most {max_stop_strings} are allowed")
    for stop in message.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise bad_request(f"stop has a string of {len(stop)} characters; each must have 1 to {MAX_STOP_CHARS}")
    if len(message.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise bad_request(f"stop_token_ids has {len(message.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed")
    for token_id in message.stop_token_ids:
        _check_range("stop_token_ids", token_id, 0, vocab_size - 1)
    _check_salt(message.cache_salt)
    _check_range("cache_priority", message.cache_priority, 0, 100)
    _check_ttl("cache_ttl_s", message.cache_ttl_s)
    _check_range("priority", message.priority, MIN_PRIORITY, MAX_PRIORITY)
    _check_ttl("deadline_s", message.deadline_s)
    _check_ttl("queue_timeout_s", message.queue_timeout_s)
    _check_sampling(message.sampling)
    check_choosing(message, max_choices=max_choices, vocab_size=vocab_size)
    check_constraint(message)
    check_speculation(message)
    check_output_rules(message, vocab_size=vocab_size)
    if message.adapter:
        check_adapter(message.adapter)


def num_bodies(message: Generate) -> int:
    """Body frames of a ``generate``: its input, its constraint's source, its tools."""
    return 1 + has_source(message) + message.tools


def check_pin(message: Pin) -> None:
    """Everything about a ``pin`` that can be told without its prompt.

    Raises:
        RequestError: ``bad_request``, naming the field and its range.
    """
    check_name(message.name)
    _check_input(message.input)
    _check_range("priority", message.priority, 0, 100)
    _check_ttl("ttl_s", message.ttl_s)
    _check_salt(message.cache_salt)
    if message.adapter:
        check_adapter(message.adapter)


def check_forget(message: Forget) -> None:
    """Everything about a ``forget`` that can be told without its prefix.

    Raises:
        RequestError: ``bad_request``, naming the field and its range.
    """
    if message.input:
        _check_input(message.input)
    _check_salt(message.cache_salt or b"")
    if message.tenant and len(message.tenant) > MAX_TENANT_CHARS:
        raise bad_request(f"tenant has {len(message.tenant)} characters; at most {MAX_TENANT_CHARS} are allowed")


def check_name(name: str) -> None:
    """Names of pins: they stand in reports, logs and command lines."""
    if not PIN_NAME.fullmatch(name):
        raise bad_request("name must have 1 to 128 letters, digits or . _ : @ + - and begin with a letter or a digit")


def check_adapter(name: str) -> None:
    """Names of adapters: what is none names no directory either."""
    if not PIN_NAME.fullmatch(name):
        raise bad_request("adapter must have 1 to 128 letters, digits or . _ : @ + - and begin with a letter or a digit")


def check_prompt(num_tokens: int, max_tokens: int | None, max_model_len: int, *, at_least: bool = False, model_len: int = 0) -> int:
    """The output tokens a choice may have: ``max_tokens``, or what the model's positions leave.

    ``at_least``: the prompt may turn out to have more tokens. ``model_len``: what the model would take, where the KV pool holds less; else 0.

    Raises:
        RequestError: ``bad_request`` for an empty prompt, ``prompt_too_long`` with the numbers.
    """
    if num_tokens == 0:
        raise bad_request("the prompt is empty")
    room = max_model_len - num_tokens
    tokens = f"{'at least ' if at_least else ''}{num_tokens} tokens"
    limit = f"{max_model_len}{why_so_few(model_len)}"
    if room < 1:
        raise RequestError(ErrorCode.PROMPT_TOO_LONG, f"the prompt has {tokens}; with one of output it exceeds {limit}")
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise RequestError(
            ErrorCode.PROMPT_TOO_LONG,
            f"the prompt has {tokens} and max_tokens is {max_tokens}; together they exceed {limit}",
        )
    return max_tokens


def why_so_few(model_len: int) -> str:
    """What a message says behind the longest length, where the KV pool holds less than the ``model_len`` positions that the model takes."""
    return f", which is what the KV pool holds (the model takes {model_len}): give the daemon more kv_memory" if model_len else ""


def check_fewest(num_tokens: int, *, max_tokens: int | None, max_model_len: int, is_truncated: bool = False, model_len: int = 0) -> None:
    """Refuse a text whose tokens, at least so many, can't fit: tokenising it would only keep others waiting. 0: nothing is known.

    Raises:
        RequestError: ``prompt_too_long``, with the numbers.
    """
    if is_truncated:
        check_truncatable(num_tokens, max_model_len)
    elif num_tokens:
        check_prompt(num_tokens, max_tokens, max_model_len, at_least=True, model_len=model_len)


def _check_sampling(sampling: Sampling) -> None:
    _check_range("temperature", sampling.temperature, 0, 100)
    _check_range("top_k", sampling.top_k, 0, (1 << 31) - 1)
    if not 0 < sampling.top_p <= 1:
        raise bad_request(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")
    _check_range("min_p", sampling.min_p, 0, 1)
    if not 0 < sampling.repetition_penalty <= 100:
        raise bad_request(f"repetition_penalty is {sampling.repetition_penalty}; it must be above 0 and at most 100")
    _check_range("presence_penalty", sampling.presence_penalty, -100, 100)
    _check_range("frequency_penalty", sampling.frequency_penalty, -100, 100)
    if sampling.seed is not None:
        _check_range("seed", sampling.seed, 0, MAX_SEED)
    if sampling.logprobs is not None:
        _check_range("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)


def _check_input(value: str) -> None:
    if value not in INPUTS:
        raise bad_request(f"input is {value!r:.40}; it must be one of {', '.join(INPUTS)}")


def _check_salt(salt: bytes) -> None:
    if len(salt) > MAX_CACHE_SALT_BYTES:
        raise bad_request(f"cache_salt has {len(salt)} bytes; at most {MAX_CACHE_SALT_BYTES} are allowed")


def _check_ttl(field: str, value: float) -> None:
    if not 0 <= value <= MAX_TTL_S:  # nan is in no range
        raise bad_request(f"{field} is {value}; it must be from 0 (no end) to {MAX_TTL_S} (a year)")


def _check_at_least(field: str, value: int, low: int) -> None:
    if value < low:
        raise bad_request(f"{field} is {value}; it must be at least {low}")


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise bad_request(f"{field} is {value}; it must be from {low} to {high}")
