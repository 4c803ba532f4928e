"""Whether what came of a request is what may come of it: its end, its numbers, and with the fake executor every token."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Failed, Finished
from kvd_client.results import Completion
from plain_answer import is_plain, plain_answer
from request_drawing import Ask
from request_rules import Facts, constraint_of, ends_of, is_held, meets, stop_ids_of
from wire_crowd import BreachError

RETRYABLE = {
    Code.STARTING,
    Code.DRAINING,
    Code.OVERLOADED,
    Code.QUEUE_TIMEOUT,
    Code.ADAPTER_CAPACITY,
    Code.ENGINE_ERROR,
    Code.STORAGE_ERROR,
}


def need(holds: Any, what: str, *about: Any) -> None:
    if not holds:
        raise BreachError(f"{what}: {'; '.join(map(repr, about))}")


def check_failure(ask: Ask, code: str, message: str, retryable: bool, retry_after_s: float, prompt_ids: Any, facts: Facts) -> None:
    """A failure is one that the request may end with, and says why."""
    ends = ends_of(ask, prompt_ids, facts)
    need(code in set(Code), "an undocumented code", code)
    fitting = [entry for entry in (*ends.must, *ends.may) if entry[0] == code and re.search(entry[1], message)]
    need(fitting, f"failed with {code}: {message!r}, may fail with {[*ends.must, *ends.may]}", ask)
    need(retryable == (code in RETRYABLE), f"{code} is retryable: {retryable}", ask)
    need(retry_after_s > 0 or code not in (Code.OVERLOADED, Code.QUEUE_TIMEOUT), f"{code} without advice", ask)


def check_end(exchange: Any, prompt_ids: list[int] | None, digest: bytes, facts: Facts) -> Completion | None:
    """The one terminal message of an exchange; its completion, if it has one that was not cut off."""
    ask, terminal = exchange.ask, exchange.terminal
    if isinstance(terminal, Failed):
        check_failure(ask, terminal.code, terminal.message, terminal.retryable, terminal.retry_after_s, prompt_ids, facts)
        return None
    assert isinstance(terminal, Finished)
    completion = exchange.answer.complete(terminal)
    sent = {choice: len(token_ids) for choice, token_ids in exchange.token_ids.items()}
    for end in terminal.choices:
        need(end.num_tokens == sent.get(end.choice, 0), f"{end.num_tokens} tokens counted, {sent} sent", ask)
    is_cut = any(choice.finish_reason == "aborted" for choice in completion.choices)
    need(exchange.is_aborted or not is_cut, "aborted by nobody", ask)
    if ends_of(ask, prompt_ids, facts).must:
        nothing = not any(sent.values())
        need(is_cut and nothing, f"answered, must fail with {ends_of(ask, prompt_ids, facts).must}", ask)
        return None
    check_completion(ask, completion, prompt_ids, digest, facts)
    return None if is_cut else completion


def check_completion(ask: Ask, completion: Completion, prompt_ids: list[int] | None, digest: bytes, facts: Facts) -> None:
    """Numbers and texts of an answer, cut off or not."""
    options = ask.options
    need(len(completion.choices) == options.get("n", 1), "another number of choices", ask)
    if "seed" in options:
        need(completion.seed == options["seed"], f"seed {completion.seed}", ask)
    _check_usage(ask, completion, prompt_ids)
    if "echo" in options or options.get("prompt_logprobs") is not None:
        _check_prompt(ask, completion, prompt_ids, facts)
    for choice in completion.choices:
        _check_choice(ask, choice, facts)
    if is_held(ask) and all(choice.finish_reason != "aborted" for choice in completion.choices):
        ranked = [choice.score if "beam_width" in options else choice.cumulative_logprob for choice in completion.choices]
        need(None not in ranked and ranked == sorted(ranked, reverse=True), f"ranked {ranked}", ask)
    if facts.is_fake and prompt_ids is not None and is_plain(ask):
        _check_against_plain(ask, completion, prompt_ids, digest, facts)


def _check_usage(ask: Ask, completion: Completion, prompt_ids: list[int] | None) -> None:
    usage = completion.usage
    is_cut = any(choice.finish_reason == "aborted" for choice in completion.choices)
    if prompt_ids is not None and not (is_cut and not usage.prompt_tokens):  # 0: it ended before it was known
        need(usage.prompt_tokens == len(prompt_ids), f"{usage.prompt_tokens} prompt tokens, not {len(prompt_ids)}", ask)
    need(0 <= usage.cached_tokens <= max(0, usage.prompt_tokens - 1), f"cached: {usage}", ask)
    need(usage.restored_tokens + usage.recomputed_tokens <= usage.cached_tokens, f"restored: {usage}", ask)
    need(usage.completion_tokens == sum(len(choice.token_ids) for choice in completion.choices), f"completion: {usage}", ask)
    if ask.options.get("prompt_logprobs") is not None:
        need(usage.cached_tokens == 0, f"scored, and cached: {usage}", ask)
    need(0 <= usage.accepted_tokens <= usage.drafted_tokens, f"drafts: {usage}", ask)
    may_draft = ask.options.get("speculation", "off") != "off" and "beam_width" not in ask.options
    need(may_draft or not usage.drafted_tokens, f"drafts unasked for: {usage}", ask)


def _check_prompt(ask: Ask, completion: Completion, prompt_ids: list[int] | None, facts: Facts) -> None:
    told = completion.prompt
    if told is None or not completion.usage.completion_tokens:
        need(not completion.usage.completion_tokens, "nothing was told of the prompt", ask)
        return
    if ask.options.get("echo") and prompt_ids is not None:
        need(list(told.token_ids) == prompt_ids, "another prompt was echoed", ask, told)
        text = bytes(prompt_ids).decode("utf-8", "replace") if facts.is_fake else told.text
        need(text.startswith(told.text), "another text was echoed", ask, told)
    num_top = ask.options.get("prompt_logprobs")
    if num_top is not None:
        need(len(told.logprobs) == completion.usage.prompt_tokens - 1, f"{len(told.logprobs)} scores", ask)
        need(all(len(entry.top) == num_top for entry in told.logprobs), "too few of the most likely", ask)
        if prompt_ids is not None:
            need([entry.token_id for entry in told.logprobs] == prompt_ids[1:], "scores of other tokens", ask)


def _check_choice(ask: Ask, choice: Any, facts: Facts) -> None:
    options, token_ids = ask.options, choice.token_ids
    stop_ids = stop_ids_of(ask, facts)
    most, fewest = options["max_tokens"], options.get("min_tokens", 0)
    constraint = constraint_of(ask)
    need(len(token_ids) <= most, "too many tokens", ask, choice)
    need(choice.finish_reason in ("stop", "length", "aborted"), "an unknown reason", ask, choice)
    need(all(0 <= token_id < facts.vocab_size for token_id in token_ids), "no token", ask, choice)
    if choice.finish_reason == "length":
        need(len(token_ids) == most, "cut off too early", ask, choice)
    if allowed := options.get("allowed_token_ids"):
        need(set(token_ids) <= set(allowed), "a token that is not allowed", ask, choice)
    need(set(token_ids).isdisjoint(options.get("banned_token_ids", ())), "a banned token", ask, choice)
    early_stops = [place for place, token_id in enumerate(token_ids[:-1]) if token_id in stop_ids]
    need(not early_stops or constraint is not None, "it went on after its stop token", ask, choice)
    ended_by_stop = bool(token_ids) and token_ids[-1] in stop_ids
    if choice.finish_reason == "stop" and constraint is None:
        need(len(token_ids) > fewest or not fewest, "it ended before min_tokens", ask, choice)
        need(ended_by_stop or options.get("stop"), "it stopped for no reason", ask, choice)
    if "logprobs" in options and choice.finish_reason != "aborted":
        need(len(choice.logprobs) == len(token_ids), "log-probabilities are missing", ask, choice)
        need([entry.token_id for entry in choice.logprobs] == list(token_ids), "log-probabilities of others", ask, choice)
        need(all(len(entry.top) == options["logprobs"] for entry in choice.logprobs), "too few of the most likely", ask, choice)
        total = sum(entry.logprob for entry in choice.logprobs)
        need(abs((choice.cumulative_logprob or 0.0) - total) < 1e-4 * max(1, len(token_ids)), f"a sum of {total}", ask, choice)
    if not options.get("text", True):
        need(choice.text == "", "a text that nobody wants", ask, choice)
    elif constraint is not None and choice.finish_reason == "stop" and not options.get("stop"):
        by_own_id = ended_by_stop and token_ids[-1] in options.get("stop_token_ids", ())
        need(by_own_id or meets(constraint, choice.text), "the constraint is not met", ask, choice)


def _check_against_plain(ask: Ask, completion: Completion, prompt_ids: list[int], digest: bytes, facts: Facts) -> None:
    """Every token, log-probability and character is what a lone runner says."""
    plain = plain_answer(ask, prompt_ids, completion.seed, digest, facts)
    for right, choice in zip(plain, completion.choices, strict=True):
        if choice.finish_reason == "aborted":
            need(not is_held(ask) or not choice.token_ids, "a part of what is told as a whole", ask, choice)
            need(right.token_ids[: len(choice.token_ids)] == choice.token_ids, "wrong tokens", ask, choice, right)
            continue
        need((right.token_ids, right.finish_reason) == (choice.token_ids, choice.finish_reason), "wrong tokens", ask, choice, right)
        if ask.options.get("text", True):
            need(right.text == choice.text, "another text", ask, choice, right)
        if "logprobs" in ask.options:
            told = [(entry.token_id, entry.logprob, tuple(entry.top)) for entry in choice.logprobs]
            need(told == [(entry.token_id, entry.logprob, entry.top) for entry in right.logprobs], "wrong log-probabilities", ask, choice)


def same_answer(ask: Ask, first: Completion, second: Completion, tolerance: float) -> None:
    """A request that is asked again, alone, is answered alike."""
    for one, other in zip(first.choices, second.choices, strict=True):
        need(one.token_ids == other.token_ids, "other tokens the second time", ask, one, other)
        need((one.text, one.finish_reason) == (other.text, other.finish_reason), "another end the second time", ask, one, other)
        for name in ("score", "cumulative_logprob"):
            a, b = getattr(one, name), getattr(other, name)
            need((a is None) == (b is None) and abs((a or 0) - (b or 0)) <= tolerance * max(1, len(one.token_ids)), name, ask, a, b)
        _same_logprobs(ask, one.logprobs, other.logprobs, tolerance)
    need(first.usage.prompt_tokens == second.usage.prompt_tokens, "another prompt the second time", ask)
    if first.prompt is not None and second.prompt is not None:
        need((first.prompt.token_ids, first.prompt.text) == (second.prompt.token_ids, second.prompt.text), "another echo", ask)
        _same_logprobs(ask, first.prompt.logprobs, second.prompt.logprobs, tolerance)


def _same_logprobs(ask: Ask, first: Any, second: Any, tolerance: float) -> None:
    need(len(first) == len(second), "fewer log-probabilities", ask)
    for one, other in zip(first, second, strict=True):
        need(one.token_id == other.token_id and abs(one.logprob - other.logprob) <= tolerance, "other log-probabilities", ask, one, other)
        near = [abs(a[1] - b[1]) <= tolerance for a, b in zip(one.top, other.top, strict=True)]
        need(all(near), "other log-probabilities of the most likely", ask, one, other)


def tally(counts: Counter[str], asks: list[Ask]) -> None:
    """What was asked for, so that a run can say what it has seen."""
    for ask in asks:
        counts.update(f"with {name}" for name in ask.options)
        counts["spoilt"] += bool(ask.spoilt)
