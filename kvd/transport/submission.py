"""From a ``generate`` whose prompt is tokenised and whose fields are checked to the engine's command."""

from __future__ import annotations

from kvd_client.protocol.messages import Generate, Sampling

from kvd.cache.tenants import tenant_salt
from kvd.commands import Submit
from kvd.transport.choosing import beam_search
from kvd.transport.drafting import speculation
from kvd.transport.times import times_left
from kvd.types import Constraint, SamplingParams


def submit_command(
    message: Generate,
    token_ids: bytes,
    *,
    tenant: str,
    seed: int,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    credit_tokens: int,
    waited_s: float,
    constraint: Constraint | None,
    bad_words: tuple[tuple[int, ...], ...],
) -> Submit:
    """The command, with every default resolved. ``token_ids`` is packed, ``waited_s`` the time since the request's arrival.

    Raises:
        RequestError: a time that it named is over already.
    """
    deadline_s, queue_timeout_s = times_left(message, waited_s)
    return Submit(
        request_id=message.request_id,
        token_ids=token_ids,
        sampling=sampling_params(message.sampling, seed, bad_words),
        max_tokens=max_tokens,
        may_shorten=message.max_tokens is None,
        num_choices=message.n,
        min_tokens=message.min_tokens,
        stop_token_ids=stop_token_ids,
        credit_tokens=credit_tokens,
        tenant_salt=tenant_salt(tenant, message.cache_salt),
        cache_priority=message.cache_priority,
        cache_ttl_s=message.cache_ttl_s,
        tenant=tenant,
        priority=message.priority,
        deadline_s=deadline_s,
        queue_timeout_s=queue_timeout_s,
        adapter_name=message.adapter,
        best_of=message.best_of,
        beam=beam_search(message.beam),
        speculation=speculation(message.speculation),
        constraint=constraint,
        prompt_logprobs=message.prompt_logprobs,
    )


def sampling_params(sampling: Sampling, seed: int, bad_words: tuple[tuple[int, ...], ...]) -> SamplingParams:
    """The engine's parameters, with every default resolved."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=seed,
        num_logprobs=sampling.logprobs,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        banned_token_ids=sampling.banned_token_ids,
        bad_words=bad_words,
    )
