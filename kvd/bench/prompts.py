"""The workload's text: sentences by a seeded choice of words, the same for the same seed on every machine and for every target.

Prompts are text and not ids, since an OpenAI-compatible server takes nothing else; sizes in tokens come about by the number of sentences, whose mean length in tokens
the first target is asked for once. So all targets get the same characters, and with the same tokenizer and template the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Messages = list[dict[str, str]]

_SUBJECTS = (
    "the customer", "a support agent", "the billing team", "our warehouse", "the delivery driver", "a new user",
    "the administrator", "the night shift", "a partner store", "the returns desk", "the account owner", "the regional manager",
)  # fmt: skip
_DUTIES = (
    "should confirm", "must never share", "may request", "needs to record", "will review", "has to update",
    "can cancel", "should explain", "must check", "may postpone", "will archive", "should compare",
)  # fmt: skip
_OBJECTS = (
    "the order number", "an invoice copy", "the shipping address", "a refund decision", "the warranty terms", "the contact details",
    "a service ticket", "the delivery window", "the payment method", "a damaged parcel", "the loyalty balance", "the opening hours",
)  # fmt: skip
_TIMES = (
    "before closing the conversation", "within two working days", "when the system is offline", "after the first reminder",
    "if the request comes by phone", "during a public holiday", "once the identity is verified", "without asking for a password",
    "unless a manager approves it", "as soon as the parcel arrives", "in a short polite message", "at the end of each month",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizing:
    """How sentences of a system prompt become tokens of a whole prompt whose question asks nothing: ``tokens = fixed_tokens + sentences * sentence_tokens``."""

    fixed_tokens: float
    sentence_tokens: float

    def sentences(self, num_tokens: int) -> int:
        """How many make a system prompt that brings a whole prompt near ``num_tokens``; at least one."""
        return max(1, round((num_tokens - self.fixed_tokens) / self.sentence_tokens))


def seed_of(*parts: int | str) -> str:
    """A seed that is one place in a plan; different for each (scenario, round, …)."""
    return "/".join(map(str, parts))


def rules(seed: str, num_sentences: int) -> str:
    """A system prompt. Two seeds differ from the first words on, so that nothing is shared but the template's own tokens."""
    choose = random.Random(seed)  # noqa: S311  words, not secrets
    name = " ".join(choose.choice(_OBJECTS).split(" ", 1)[1] for _ in range(3))
    body = (
        f"Rule: {choose.choice(_SUBJECTS)} {choose.choice(_DUTIES)} {choose.choice(_OBJECTS)} {choose.choice(_TIMES)}."
        for _ in range(num_sentences)
    )
    return f"File {name} {choose.randrange(1_000_000)}: you are a careful assistant and follow these rules. {' '.join(body)}"


def question(seed: str, num_sentences: int = 3) -> str:
    """A user's turn of about 20 tokens a sentence; without any, a few words that a long prompt ends with."""
    choose = random.Random(f"question {seed}")  # noqa: S311
    asked = (
        f"What happens when {choose.choice(_SUBJECTS)} {choose.choice(_DUTIES)} {choose.choice(_OBJECTS)} {choose.choice(_TIMES)}?"
        for _ in range(num_sentences)
    )
    return f"Please answer. {' '.join(asked)}"


def story(seed: str) -> str:
    """A short request whose answer may be long."""
    choose = random.Random(f"story {seed}")  # noqa: S311
    return f"Tell a story about {choose.choice(_SUBJECTS)} and {choose.choice(_OBJECTS)}, number {choose.randrange(1_000_000)}."


def repetition(seed: str, kind: int, num_sentences: int) -> str:
    """A request whose answer repeats most of it. There are four kinds: a copy, a copy with a word replaced, a list as JSON, a log that goes on.

    Two seeds differ from the first words on.
    """
    choose = random.Random(f"repetition {seed}")  # noqa: S311
    tag = f"{choose.randrange(1_000_000):06}"
    facts = [tuple(map(choose.choice, (_SUBJECTS, _DUTIES, _OBJECTS, _TIMES))) for _ in range(num_sentences)]
    text = " ".join(f"{who.capitalize()} {duty} {what} {when}." for who, duty, what, when in facts)
    match kind % 4:
        case 0:
            return f"{tag}: repeat this text word for word:\n\n{text}"
        case 1:
            return f"{tag}: write this text again with the word 'file' in place of 'order', and change nothing else:\n\n{text}"
        case 2:
            entries = "\n".join(f"- {who}: {what}, {when}" for who, _, what, when in facts)
            return f'{tag}: write each line as {{"who": "…", "what": "…", "when": "…"}}:\n\n{entries}'
        case _:
            times = (f"{8 + number // 60:02}:{number % 60:02}" for number in range(num_sentences))
            lines = "\n".join(f"{time} INFO service={tag} action='{what}'" for time, (_, _, what, _) in zip(times, facts, strict=True))
            return f"{tag}: continue this log with the same actions again:\n\n{lines}"


def chat(system: str, user: str) -> Messages:
    """A system prompt and a user's first turn."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def alone(user: str) -> Messages:
    """A user's turn without a system prompt."""
    return [{"role": "user", "content": user}]


def block(seed: str, block_id: int, num_sentences: int) -> str:
    """The text that stands for one block of a trace: equal ids give equal text under one seed, and under two seeds they differ from the first words on."""
    tag = random.Random(f"blocks {seed}").randrange(1_000_000)  # noqa: S311
    choose = random.Random(f"block {seed}/{block_id}")  # noqa: S311
    return " ".join(
        f"Note {tag}-{block_id}: {choose.choice(_SUBJECTS)} {choose.choice(_DUTIES)} {choose.choice(_OBJECTS)} {choose.choice(_TIMES)}."
        for _ in range(num_sentences)
    )


def joined(blocks: Sequence[str]) -> str:
    """Blocks in a row: what two rows have in common from their beginning stays in common."""
    return " ".join(blocks)
