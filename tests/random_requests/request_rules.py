"""How a request may end, told from what it asks for: the manual's rules about what goes together, in their plainest form."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from kvd_client.protocol.codes import Code
from request_drawing import ADAPTERS, CONSTRAINTS, MISSING_ADAPTER, SPOILS, Ask
from schema_check import matches

CONSTRAINT_NAMES = tuple({name for each in CONSTRAINTS for name in each})
PATTERNS = {
    'start: NAME "(" /[0-9]{1,3}/ ")"\nNAME: /[a-z]{1,6}/\n': r"[a-z]{1,6}\([0-9]{1,3}\)",
    'root ::= ("yes" | "no")+': "(yes|no)+",
}
"""What the grammars that are drawn mean."""
_BLOCK = 16
_NO_BEAM_OPTIONS = ("logit_bias", "allowed_token_ids", "banned_token_ids", "bad_words", "stop", *CONSTRAINT_NAMES)
ANY_WORDS = r"\w+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the daemon was started with."""

    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos: tuple[int, ...]
    is_fake: bool = True
    may_overload: bool = False
    has_draft: bool = False
    takes_tools: bool = True
    """Whether the chat template has a place for them."""


@dataclass(slots=True)
class Ends:
    """The failures that a request may end with."""

    must: list[tuple[str, str]] = field(default_factory=list)
    """If there are any: one of these codes, with a message that has these words, unless what may happen to anybody happens first."""
    may: list[tuple[str, str]] = field(default_factory=list)


def ends_of(ask: Ask, prompt_ids: list[int] | None, facts: Facts) -> Ends:
    """``prompt_ids``: those that the daemon will compute, where they are known."""
    ends = Ends(may=list(_in_passing(ask, facts)))
    bad = [(Code.BAD_REQUEST, words) for words in _conflicts(ask, facts)]
    if ask.spoilt:
        bad.append((SPOILS[ask.spoilt].code, SPOILS[ask.spoilt].words))
        ends.must = bad
        return ends
    options = ask.options
    if options.get("adapter") == MISSING_ADAPTER:
        bad.append((Code.NOT_FOUND, f"no adapter is named '{MISSING_ADAPTER}'"))
    if prompt_ids is not None:
        num_prompt, num_out = len(prompt_ids), options["max_tokens"]
        if num_prompt + num_out > facts.max_model_len:
            bad.append((Code.PROMPT_TOO_LONG, str(facts.max_model_len)))
        needed = blocks_needed(num_prompt, num_out, num_sequences(ask))
        if needed > facts.num_blocks:
            bad.append((Code.KV_CAPACITY, f"{needed} KV blocks"))
        elif needed > facts.num_blocks // 2:
            ends.may.append((Code.KV_CAPACITY, "pins|pinned"))  # which hold half of them at most
    left, left_late = _left(ask, facts)
    if not left:
        bad.append((Code.BAD_REQUEST, "no token may be sampled"))
    elif not left_late:
        bad.append((Code.BAD_REQUEST, "min_tokens"))
    if _may_get_stuck(ask):
        ends.may.append((Code.BAD_REQUEST, "no token"))
    ends.must = bad
    return ends


def num_sequences(ask: Ask) -> int:
    options = ask.options
    return max(options.get("n", 1), options.get("best_of", 0), options.get("beam_width", 0))


def blocks_needed(num_prompt: int, num_out: int, num_sequences: int) -> int:
    num_shared = num_prompt // _BLOCK
    return num_shared + num_sequences * (-(-(num_prompt + num_out - 1) // _BLOCK) - num_shared)


def is_held(ask: Ask) -> bool:
    """Whether nothing is told before the end."""
    return "beam_width" in ask.options or ask.options.get("best_of", 0) > ask.options.get("n", 1)


def constraint_of(ask: Ask) -> tuple[str, Any] | None:
    return next(((name, ask.options[name]) for name in CONSTRAINT_NAMES if name in ask.options), None)


def meets(constraint: tuple[str, Any], text: str) -> bool:
    """Whether a whole answer is what its constraint describes."""
    try:
        return _meets(constraint, text)
    except ValueError:
        return False


def _meets(constraint: tuple[str, Any], text: str) -> bool:
    match constraint:
        case "json_schema", dict(schema):
            return matches(json.loads(text), schema)
        case "regex", str(pattern):
            return re.fullmatch(pattern, text) is not None
        case "choice", list(choices):
            return text in choices
        case "lark", str(grammar):
            return re.fullmatch(PATTERNS[grammar], text) is not None
    json.loads(text)
    return True


def repeats(ask: Ask) -> bool:
    """Whether the same seed gives the same answer whatever else happens."""
    options = ask.options
    return options.get("draft_acceptance") != "rejection" or options.get("temperature", 1.0) == 0.0


def _in_passing(ask: Ask, facts: Facts) -> Any:
    """What may happen to any request of its kind."""
    if ask.options.get("deadline_s"):
        yield Code.DEADLINE_EXCEEDED, "deadline_s"
    if ask.options.get("queue_timeout_s"):
        yield Code.QUEUE_TIMEOUT, "queue_timeout_s"
    if ask.credit and ask.reader != "eager":
        yield Code.CLIENT_TOO_SLOW, ANY_WORDS
    if facts.may_overload:
        yield Code.OVERLOADED, ANY_WORDS


def _conflicts(ask: Ask, facts: Facts) -> list[str]:
    """What does not go together, as words of the refusal."""
    options, found = ask.options, []
    temperature = options.get("temperature", 1.0)
    n, best_of = options.get("n", 1), options.get("best_of", 0)
    if "beam_width" in options:
        found += ["best_of"] if best_of else []
        found += ["draws nothing"] if temperature not in (0.0, 1.0) or _truncates(options) else []
        penalties = (options.get("repetition_penalty", 1.0), options.get("presence_penalty", 0.0), options.get("frequency_penalty", 0.0))
        found += ["penalties"] if penalties != (1.0, 0.0, 0.0) else []
        found += [f"(?s){name}.*beam|beam.*{name}" for name in _NO_BEAM_OPTIONS if options.get(name) and name not in CONSTRAINT_NAMES]
        found += ["constraint and beam|beam.*constraint"] if constraint_of(ask) else []
        found += ["beam search does not speculate"] if options.get("speculation", "off") != "off" else []
        found += [f"{n} choices are asked for of {options['beam_width']} beams"] if n > options["beam_width"] else []
    elif best_of:
        found += ["best_of is"] if best_of < n or (best_of > n and temperature == 0.0) else []
        found += ["stop and best_of"] if best_of > n and options.get("stop") else []
    if "tools" in options and not (isinstance(ask.prompt, tuple) and isinstance(ask.prompt[0], dict)):
        found.append("tools are for the chat template")
    if options.get("include_stop") and not options.get("stop"):
        found.append("include_stop")
    if options.get("draft_acceptance") == "rejection" and "seed" in options:
        found.append("rejection and seed")
    if options.get("speculation") == "draft":
        found += [] if facts.has_draft else ["no draft model"]
        found += ["draft model"] if constraint_of(ask) else []
    if "tools" in options and not facts.takes_tools:
        found.append("no place for tools")
    return found


def _truncates(options: dict[str, Any]) -> bool:
    return bool(options.get("top_k") or options.get("top_p", 1.0) < 1 or options.get("min_p"))


def _left(ask: Ask, facts: Facts) -> tuple[bool, bool]:
    """Whether the rules leave a token, and whether they do before ``min_tokens``. Of other models only the ids of single bytes would be missing."""
    options = ask.options
    if not options.get("allowed_token_ids"):
        return True, True
    banned = set(options.get("banned_token_ids", ()))
    if facts.is_fake:
        banned |= {ord(word.strip(" ")) for word in options.get("bad_words", ()) if len(word.strip(" ")) == 1}
    left = set(options["allowed_token_ids"]) - banned
    early = stop_ids_of(ask, facts) if options.get("min_tokens") else set()
    return bool(left), bool(left - early)


def stop_ids_of(ask: Ask, facts: Facts) -> set[int]:
    return set(ask.options.get("stop_token_ids", ())) | (set() if ask.options.get("ignore_eos") else set(facts.eos))


def _may_get_stuck(ask: Ask) -> bool:
    """Rules that forbid by what stands before may leave nothing on the way."""
    options = ask.options
    rules = [name for name in ("allowed_token_ids", "banned_token_ids", "bad_words") if options.get(name)]
    if constraint_of(ask):
        return bool(rules) or bool(options.get("min_tokens") and options.get("stop_token_ids"))
    return "allowed_token_ids" in rules and "bad_words" in rules


__all__ = ["ADAPTERS", "Ends", "Facts", "constraint_of", "ends_of", "is_held", "meets", "repeats", "stop_ids_of"]
