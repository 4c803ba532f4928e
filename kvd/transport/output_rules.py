"""What a request may ask for of its tokens and of its prompt: bias, allowed and banned ids, bad words, log-probabilities of the prompt, truncation, tools."""

from __future__ import annotations

import math
from collections.abc import Collection

from kvd_client.protocol.messages import Generate, Sampling

from kvd.transport.errors import RequestError, bad_request
from kvd.types import ErrorCode

MAX_LOGIT_BIAS = 100
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 128
MAX_PROMPT_LOGPROBS = 20
TRUNCATABLE = 8
"""A text with more than so many times ``max_model_len`` tokens is refused, not cut: tokenising it would only keep others waiting."""


def check_output_rules(message: Generate, *, vocab_size: int) -> None:
    """Everything about these fields that can be told without the prompt.

    Raises:
        RequestError: ``bad_request``, naming the field and its range.
    """
    _check_token_rules(message.sampling, vocab_size)
    if len(message.bad_words) > MAX_BAD_WORDS:
        raise bad_request(f"bad_words has {len(message.bad_words)} words; at most {MAX_BAD_WORDS} are allowed")
    for word in message.bad_words:
        if not word.strip(" ") or len(word) > MAX_BAD_WORD_CHARS:
            raise bad_request(
                f"bad_words has a word of {len(word)} characters; each must have 1 to {MAX_BAD_WORD_CHARS}, not all of them spaces"
            )
    if message.beam is not None and (rule := _first_rule(message)):
        raise bad_request(f"{rule} and beam don't go together: beams are chosen by the model's own distribution; leave one of them out")
    if message.prompt_logprobs is not None and not 0 <= message.prompt_logprobs <= MAX_PROMPT_LOGPROBS:
        raise bad_request(f"prompt_logprobs is {message.prompt_logprobs}; it must be from 0 to {MAX_PROMPT_LOGPROBS}")
    if message.truncate_prompt < -1:
        raise bad_request(f"truncate_prompt is {message.truncate_prompt}; it must be a number of tokens, -1 (what fits) or 0 (all)")
    if message.tools and message.input != "messages":
        raise bad_request(f"tools are for the chat template; with input {message.input} there is none: send messages")
    if message.include_stop and not message.stop:
        raise bad_request("include_stop is about stop strings; give stop")


def check_something_is_left(
    sampling: Sampling, bad_words: Collection[tuple[int, ...]], *, early_ids: Collection[int], vocab_size: int
) -> None:
    """Refuse rules that leave no token at all. ``early_ids`` can't be sampled at first, for the sake of ``min_tokens``.

    Raises:
        RequestError: ``bad_request``, naming the fields.
    """
    banned = {*sampling.banned_token_ids, *(word[0] for word in bad_words if len(word) == 1)}
    allowed = sampling.allowed_token_ids

    def is_something_left(without: Collection[int]) -> bool:
        return not banned.union(without).issuperset(allowed) if allowed else len(banned.union(without)) < vocab_size

    if not is_something_left(()):
        raise bad_request("no token may be sampled: allowed_token_ids without banned_token_ids and bad_words leaves none")
    if not is_something_left(early_ids):
        raise bad_request("no token may be sampled before min_tokens: what is allowed only ends the output; lower min_tokens")


def keep_tokens(message: Generate, max_model_len: int) -> int:
    """How many of the prompt's last tokens are kept; 0: all."""
    if message.truncate_prompt >= 0:
        return message.truncate_prompt
    return max(1, max_model_len - (message.max_tokens or 1))


def check_truncatable(num_tokens: int, max_model_len: int) -> None:
    """Refuse to cut a text that has, at least, far more tokens than could be kept. 0: nothing is known.

    Raises:
        RequestError: ``prompt_too_long``, with the numbers.
    """
    if num_tokens > TRUNCATABLE * max_model_len:
        raise RequestError(
            ErrorCode.PROMPT_TOO_LONG,
            f"the prompt has at least {num_tokens} tokens; up to {TRUNCATABLE * max_model_len} are truncated, send its end alone",
        )


def _first_rule(message: Generate) -> str:
    sampling = message.sampling
    rules = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids,
        "banned_token_ids": sampling.banned_token_ids,
        "bad_words": message.bad_words,
    }
    return next((name for name, rule in rules.items() if rule), "")


def _check_token_rules(sampling: Sampling, vocab_size: int) -> None:
    biased = [token_id for token_id, _ in sampling.logit_bias]
    for field, ids in (
        ("logit_bias", biased),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("banned_token_ids", sampling.banned_token_ids),
    ):
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < vocab_size:
                raise bad_request(f"{field} has the id {token_id}; ids are from 0 to {vocab_size - 1}")
    if len(set(biased)) < len(biased):
        raise bad_request("logit_bias names a token id twice")
    for token_id, value in sampling.logit_bias:
        if not math.isfinite(value) or abs(value) > MAX_LOGIT_BIAS:
            raise bad_request(f"logit_bias of id {token_id} is {value}; it must be from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}")
