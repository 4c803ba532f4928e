"""What a crowd of clients asks of a daemon, drawn by hypothesis: every field of a request beside every other, most of it sensible, some of it not, and operations between.

Nothing here knows what must come of it: that is ``request_rules``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st
from kvd_client.calls import Call
from kvd_client.protocol.messages import Beam, Generate, Speculation
from kvd_client.requests import generation_call, prompt_body

ADAPTERS = ("poet", "clerk", "judge")
MISSING_ADAPTER = "nobody"
SALTS = (b"", b"", b"salt", b"pepper")
PIN_NAMES = ("rules", "laws")

BASES = (
    "The house rules say that every visitor signs the ledger before the tour begins, be it morning or noon, in the hall or in the garden.",
    "The house rules say that nobody touches the paintings; not even the curator, who has seen them hang there for thirty years.",
    "abcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabc",
    "Ünïcödé – 数 und 字, ein Satz 🙂 mit Zeichen von zwei, drei und vier Bytes, noch einer – 🙂🙂.",
)
SUFFIXES = ("", "a", " Why?", " And so on, and so on", " 🙂", " abcabc", " Because the ledger is full of names that nobody reads")

CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {
        "json_schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    },
    {"json_schema": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3}},
    {"json_schema": {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 3}]}},
    {"regex": "[a-c]{2,9}!"},
    {"regex": "(ab|ba)+é?"},
    {"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"},
    {"choice": ["yes", "no, never", '"quoted"', "yesterday"]},
    {"lark": 'start: NAME "(" /[0-9]{1,3}/ ")"\nNAME: /[a-z]{1,6}/\n'},
    {"lark": 'root ::= ("yes" | "no")+'},
    {"json": True},
)

FEATURES = (
    "adapter",
    "allowed",
    "banned",
    "beam",
    "best_of",
    "bias",
    "bad_words",
    "choices",
    "constraint",
    "constraint",
    "credit",
    "credit",
    "draft",
    "echo",
    "early_end",
    "logprobs",
    "min_tokens",
    "no_text",
    "order",
    "penalties",
    "prompt_logprobs",
    "repetitive",
    "repetitive",
    "repetitive",
    "retention",
    "salt",
    "speculation",
    "speculation",
    "stop",
    "stop_ids",
    "times",
    "tools",
    "truncate",
    "truncation_of_draws",
)
AGAINST_BEAMS = frozenset(
    (
        "repetitive",
        "allowed",
        "banned",
        "best_of",
        "bias",
        "bad_words",
        "constraint",
        "draft",
        "penalties",
        "speculation",
        "stop",
        "truncation_of_draws",
    )
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A generation, how its client reads it and when it goes away."""

    prompt: str | tuple[int, ...] | tuple[dict[str, str], ...]
    options: dict[str, Any]
    credit: int = 0
    reader: str = "eager"
    """With credit: ``eager`` gives back at once what was read, ``slow`` after a while, ``gone`` never."""
    abort_after: int | None = None
    """The client ends it after so many messages of its own; 0: at once."""
    spoilt: str = ""
    """Which of ``SPOILS`` is done to it."""
    is_sent_twice: bool = False
    """Under the same id, as after a connection that broke."""
    peer: int = 0
    pause_ms: int = 0
    """After what was sent before it."""

    def call(self, **changes: Any) -> Call:
        """The message and its bodies, as a client makes them."""
        prompt = self.prompt if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int) else None
        kind, body = prompt_body(prompt, None if prompt is not None else list(self.prompt))
        options = {**self.options, **changes}
        call, _ = generation_call(kind, body, options, stream=False, deliver=lambda _: None)
        return call

    def frames_of(self, request_id: bytes) -> tuple[Generate, list[bytes]]:
        """What goes over the wire, spoilt where it is to be."""
        call = self.call()
        message = msgspec.structs.replace(call.message, request_id=request_id, credit=self.credit)
        bodies = list(call.bodies)
        return SPOILS[self.spoilt].change(message, bodies) if self.spoilt else (message, bodies)


@dataclass(frozen=True, slots=True)
class Op:
    """An operation between the requests."""

    kind: str
    """``pin``, ``unpin``, ``forget``, ``load``, ``unload``, ``tokenize`` or ``checkpoint``."""
    text: str = ""
    name: str = ""
    salt: bytes = b""
    adapter: str = ""
    peer: int = 0
    pause_ms: int = 0


@dataclass(frozen=True, slots=True)
class Spoil:
    """One wrong field. Its refusal has the code and says ``words`` (a regular expression)."""

    fields: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    words: str = ""
    code: str = "bad_request"
    bodies: tuple[bytes, ...] | None = None
    more_bodies: tuple[bytes, ...] = ()

    def change(self, message: Generate, bodies: list[bytes]) -> tuple[Generate, list[bytes]]:
        sampling = msgspec.structs.replace(message.sampling, **self.sampling)
        message = msgspec.structs.replace(message, sampling=sampling, **self.fields)
        return message, [*(bodies if self.bodies is None else self.bodies), *self.more_bodies]


_PLAIN = {"speculation": None, "tools": False, "constraint": "", "best_of": 0, "beam": None, "stop": (), "include_stop": False}
SPOILS: dict[str, Spoil] = {
    "n": Spoil({"n": 0}, words=r"\bn is 0"),
    "many": Spoil({"n": 1000}, words=r"\bn is 1000"),
    "max_tokens": Spoil({"max_tokens": 0}, words="max_tokens is 0"),
    "min_tokens": Spoil({"max_tokens": 3, "min_tokens": 4}, words="min_tokens is 4"),
    "stops": Spoil({"stop": ("x",) * 17}, words="stop has 17"),
    "stop": Spoil({"stop": ("",)}, words="stop has a string of 0"),
    "stop_token_ids": Spoil({"stop_token_ids": (1 << 20,)}, words="stop_token_ids is 1048576"),
    "temperature": Spoil(sampling={"temperature": -1.0}, words="temperature is -1"),
    "not a number": Spoil(sampling={"temperature": float("nan")}, words="temperature is nan"),
    "top_k": Spoil(sampling={"top_k": -1}, words="top_k is -1"),
    "top_p": Spoil(sampling={"top_p": 0.0}, words="top_p is 0"),
    "min_p": Spoil(sampling={"min_p": 2.0}, words="min_p is 2"),
    "repetition_penalty": Spoil(sampling={"repetition_penalty": 0.0}, words="repetition_penalty is 0"),
    "frequency_penalty": Spoil(sampling={"frequency_penalty": 101.0}, words="frequency_penalty is 101"),
    "seed": Spoil(sampling={"seed": -1}, words="seed is -1"),
    "logprobs": Spoil(sampling={"logprobs": 21}, words="logprobs is 21"),
    "logit_bias": Spoil(sampling={"logit_bias": ((1, 200.0),)}, words="logit_bias of id 1 is 200"),
    "logit_bias twice": Spoil(sampling={"logit_bias": ((1, 1.0), (1, 2.0))}, words="logit_bias names a token id twice"),
    "allowed_token_ids": Spoil(sampling={"allowed_token_ids": (1 << 20,)}, words="allowed_token_ids has the id 1048576"),
    "banned_token_ids": Spoil(sampling={"banned_token_ids": (1 << 20,)}, words="banned_token_ids has the id 1048576"),
    "bad_words": Spoil({"bad_words": ("  ",)}, words="bad_words has a word of 2"),
    "prompt_logprobs": Spoil({"prompt_logprobs": -1}, words="prompt_logprobs is -1"),
    "truncate_prompt": Spoil({"truncate_prompt": -2}, words="truncate_prompt is -2"),
    "include_stop": Spoil({"include_stop": True, "stop": ()}, words="include_stop"),
    "cache_priority": Spoil({"cache_priority": 101}, words="cache_priority is 101"),
    "cache_ttl_s": Spoil({"cache_ttl_s": -1.0}, words="cache_ttl_s is -1"),
    "cache_salt": Spoil({"cache_salt": bytes(65)}, words="cache_salt has 65"),
    "priority": Spoil({"priority": 11}, words="priority is 11"),
    "deadline_s": Spoil({"deadline_s": float("inf")}, words="deadline_s is inf"),
    "queue_timeout_s": Spoil({"queue_timeout_s": -1.0}, words="queue_timeout_s is -1"),
    "adapter": Spoil({"adapter": "../poet"}, words="adapter must have"),
    "width": Spoil({"beam": Beam(width=0), "stop": (), "include_stop": False}, words="beam has the width 0"),
    "best_of": Spoil({"best_of": -1}, words="best_of is -1"),
    "mode": Spoil({"speculation": Speculation(mode="fast"), "beam": None}, words="speculation has the mode 'fast'"),
    "num_draft": Spoil({"speculation": Speculation(num_draft=33), "beam": None}, words="num_draft 33"),
    "acceptance": Spoil({"speculation": Speculation(acceptance="maybe"), "beam": None}, words="acceptance 'maybe'"),
    "input": Spoil({**_PLAIN, "input": "letters"}, words="input is 'letters'"),
    "credit": Spoil({"credit": -1}, words="credit is -1"),
    "frames": Spoil(more_bodies=(b"one more",), words="body frames"),
    "empty": Spoil({**_PLAIN, "input": "text", "truncate_prompt": 0}, bodies=(b"",), words="prompt is empty"),
    "no text": Spoil({**_PLAIN, "input": "text"}, bodies=(b"\xff\xfe",), words="UTF-8"),
    "half an id": Spoil({**_PLAIN, "input": "ids"}, bodies=(b"\1\0\0",), words="packed u32"),
    "no id": Spoil({**_PLAIN, "input": "ids"}, bodies=(b"\0\0\0\1",), words="token id 16777216"),
    "no chat": Spoil({**_PLAIN, "input": "messages"}, bodies=(b"\xa1x",), words="messages are not"),
    "tools": Spoil({**_PLAIN, "input": "text", "tools": True}, bodies=(b"x", b"\x91\x80"), words="tools are for the chat template"),
    "constraint": Spoil({**_PLAIN, "constraint": "xml"}, more_bodies=(b"x",), words="constraint is 'xml'"),
    "regex": Spoil({**_PLAIN, "input": "text", "constraint": "regex"}, bodies=(b"xy", b"[a"), words="unclosed"),
    "look-around": Spoil({**_PLAIN, "input": "text", "constraint": "regex"}, bodies=(b"xy", b"(?=a)b"), words="look-ahead"),
    "schema": Spoil({**_PLAIN, "input": "text", "constraint": "json_schema"}, bodies=(b"xy", b'{"type": "objekt"}'), words="objekt"),
    "choice": Spoil({**_PLAIN, "input": "text", "constraint": "choice"}, bodies=(b"xy", b"\xa1x"), words="no msgpack array"),
    "choice of none": Spoil({**_PLAIN, "input": "text", "constraint": "choice"}, bodies=(b"xy", b"\x90"), words="alternative"),
    "too long": Spoil({**_PLAIN, "input": "ids", "truncate_prompt": 0}, bodies=(b"\1\0\0\0" * 9000,), words="prompt has", code="prompt_too_long"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What token ids may be drawn, and how many output tokens."""

    likely: tuple[int, ...]
    """Ids that come out now and then."""
    eos: int
    most_tokens: int = 32
    has_draft: bool = False


BYTES = Vocabulary(likely=(*b"etaoinshrdlu ,.E0", *"é🙂".encode()), eos=256)


@st.composite
def prompts(draw: Any, vocabulary: Vocabulary) -> str | tuple[int, ...] | tuple[dict[str, str], ...]:
    base = draw(st.sampled_from(BASES))
    # Cuts anywhere: what two prompts share ends inside of blocks.
    text = base[: draw(st.integers(0, len(base)))] + draw(st.sampled_from(SUFFIXES))
    text = text or "x"
    match draw(st.sampled_from(("text", "text", "ids", "messages"))):
        case "text":
            return text
        case "ids":
            # Of a model whose tokens are not bytes these are small ids, which are tokens all the same. They may end within a character.
            return tuple(text.encode()[: draw(st.integers(1, 200))])
        case _:
            messages = [{"role": "user", "content": text}]
            if draw(st.booleans()):
                messages.insert(0, {"role": "system", "content": draw(st.sampled_from(BASES))[:40]})
            return tuple(messages)


@st.composite
def asks(draw: Any, vocabulary: Vocabulary) -> Ask:
    prompt = draw(prompts(vocabulary))
    features = draw(st.sets(st.sampled_from(FEATURES), max_size=8))
    if draw(st.integers(0, 9)) < 9:  # else it may ask for what does not go together
        features = _without_conflicts(features, prompt)
    options: dict[str, Any] = {"max_tokens": draw(st.one_of(st.integers(1, vocabulary.most_tokens), st.integers(1, 8)))}
    if "beam" not in features or "truncation_of_draws" in features:
        options["temperature"] = draw(st.sampled_from((0.0, 0.0, 0.4, 1.0, 1.7)))
    if draw(st.integers(0, 3)):
        options["seed"] = draw(st.sampled_from((0, 1, 7, (1 << 64) - 1)))
    if draw(st.integers(0, 2)):
        options["ignore_eos"] = True
    ids = st.sampled_from(vocabulary.likely)
    for feature in sorted(features):
        _draw_feature(draw, feature, features, options, ids, vocabulary)
    if options.get("temperature", 1.0) == 0.0 and "best_of" in features and draw(st.integers(0, 7)):
        options["temperature"] = 1.0
    if options.get("draft_acceptance") == "rejection" and draw(st.integers(0, 7)):
        options.pop("seed", None)
    if options.get("min_tokens", 0) > options["max_tokens"]:
        options["min_tokens"] = options["max_tokens"]
    credit, reader = 0, "eager"
    if "credit" in features or ("repetitive" in features and draw(st.booleans())):
        credit = draw(st.integers(1, 8))
        reader = draw(st.sampled_from(("eager", "eager", "slow", "gone")))
    abort_after = draw(st.sampled_from((None, None, None, None, None, None, None, 0, 1, 3)))
    spoilt = draw(st.sampled_from(sorted(SPOILS))) if draw(st.integers(0, 8)) == 8 else ""
    return Ask(
        prompt,
        options,
        credit=credit,
        reader=reader,
        abort_after=abort_after,
        spoilt=spoilt,
        is_sent_twice=draw(st.integers(0, 11)) == 11,
        peer=draw(st.integers(0, 2)),
        pause_ms=draw(st.sampled_from((0, 0, 0, 0, 1, 3))),
    )


def _without_conflicts(features: set[str], prompt: Any) -> set[str]:
    if "beam" in features:
        features = features - AGAINST_BEAMS
    if not (isinstance(prompt, tuple) and isinstance(prompt[0], dict)):
        features = features - {"tools"}
    if "best_of" in features:
        features = features - {"stop"}
    return features - {"draft"}


def _draw_feature(draw: Any, feature: str, features: set[str], options: dict[str, Any], ids: Any, vocabulary: Vocabulary) -> None:
    match feature:
        case "adapter":
            options["adapter"] = draw(st.sampled_from((*ADAPTERS, *ADAPTERS, MISSING_ADAPTER)))
        case "allowed":
            options["allowed_token_ids"] = tuple(draw(st.sets(ids, min_size=1, max_size=6)))
        case "banned":
            options["banned_token_ids"] = tuple(draw(st.sets(ids, min_size=1, max_size=4)))
        case "beam":
            options["beam_width"] = draw(st.integers(1, 4))
            options["n"] = draw(st.integers(1, options["beam_width"]))
            options["length_penalty"] = draw(st.sampled_from((1.0, 0.0, -1.0, 2.0)))
            options["early_stopping"] = draw(st.sampled_from((False, True, "never")))
        case "best_of":
            options["best_of"] = draw(st.integers(1, 4))
            options["n"] = draw(st.integers(1, options["best_of"]))
        case "bias":
            options["logit_bias"] = dict(draw(st.lists(st.tuples(ids, st.sampled_from((-100.0, -1.0, 2.0, 30.0))), min_size=1, max_size=4)))
        case "bad_words":
            options["bad_words"] = tuple(
                draw(st.sets(st.sampled_from(("e", "th", "an", "the", " a", "ab", "er", "in")), min_size=1, max_size=3))
            )
        case "choices" if "beam" not in features and "best_of" not in features:
            options["n"] = draw(st.integers(1, 4))
        case "constraint":
            options.update(draw(st.sampled_from(CONSTRAINTS)))
            options["max_tokens"] = draw(st.sampled_from((3, 20, 40)))
        case "draft":
            options["speculation"] = "draft"
        case "early_end":
            options["ignore_eos"] = False
            options["max_tokens"] = 2 * vocabulary.most_tokens
        case "echo":
            options["echo"] = True
        case "logprobs":
            options["logprobs"] = draw(st.sampled_from((0, 1, 5, 20)))
        case "min_tokens":
            options["min_tokens"] = draw(st.integers(0, options["max_tokens"]))
        case "no_text":
            options["text"] = False
        case "order":
            options["priority"] = draw(st.integers(-10, 10))
        case "penalties":
            options["repetition_penalty"] = draw(st.sampled_from((1.0, 1.3)))
            options["presence_penalty"] = draw(st.sampled_from((0.0, 0.5)))
            options["frequency_penalty"] = draw(st.sampled_from((0.0, -0.2)))
        case "prompt_logprobs":
            options["prompt_logprobs"] = draw(st.sampled_from((0, 1, 4)))
        case "retention":
            options["cache_priority"] = draw(st.integers(0, 100))
            options["cache_ttl_s"] = draw(st.sampled_from((0.0, 0.01, 1.0)))
        case "repetitive":  # what came before comes again, so that much is drafted, and some of it is wrong
            options["allowed_token_ids"] = tuple(sorted(draw(st.sets(ids, min_size=2, max_size=3))))
            options["max_tokens"] = 2 * vocabulary.most_tokens
            options["ignore_eos"] = True
            options.setdefault("speculation", draw(st.sampled_from(("ngram", "auto"))))
            first, *_, last = options["allowed_token_ids"]
            if vocabulary is BYTES and last < 128 and draw(st.booleans()):
                options["bad_words"] = (draw(st.sampled_from((chr(first) + chr(last), chr(last) + chr(first), 2 * chr(last)))),)
        case "salt":
            options["cache_salt"] = draw(st.sampled_from(SALTS))
        case "speculation":
            options["speculation"] = draw(st.sampled_from(("ngram", "auto", "off", "draft" if vocabulary.has_draft else "ngram")))
            if options["speculation"] != "off":
                options["num_draft"] = draw(st.sampled_from((0, 1, 4, 32)))
                options["draft_acceptance"] = draw(st.sampled_from(("coupled", "coupled", "rejection")))
        case "stop":
            options["stop"] = tuple(draw(st.sets(st.sampled_from(("e", "th", "a", "in", "er ", "🙂", "zz", "\n")), min_size=1, max_size=3)))
            options["include_stop"] = draw(st.booleans())
            if draw(st.booleans()):
                options["min_tokens"] = draw(st.integers(0, options["max_tokens"]))
        case "stop_ids":
            options["stop_token_ids"] = tuple(draw(st.sets(ids, min_size=1, max_size=3)))
        case "times":
            options["deadline_s"] = draw(st.sampled_from((0.0, 0.01, 0.2, 60.0, 60.0)))
            options["queue_timeout_s"] = draw(st.sampled_from((0.0, 0.01, 60.0, 60.0)))
        case "tools":
            options["tools"] = ({"name": "look_up", "parameters": {"type": "object"}},)
        case "truncate":
            options["truncate_prompt"] = draw(st.sampled_from((-1, 1, 5, 16, 33)))
        case "truncation_of_draws":
            options["top_k"] = draw(st.sampled_from((0, 1, 5)))
            options["top_p"] = draw(st.sampled_from((1.0, 0.9)))
            options["min_p"] = draw(st.sampled_from((0.0, 0.1)))


@st.composite
def ops(draw: Any) -> Op:
    kind = draw(st.sampled_from(("pin", "pin", "unpin", "forget", "load", "unload", "tokenize", "checkpoint")))
    base = draw(st.sampled_from(BASES))
    return Op(
        kind,
        text=base[: draw(st.sampled_from((8, 16, 40, 60)))],
        name=draw(st.sampled_from((*ADAPTERS, MISSING_ADAPTER) if kind in ("load", "unload") else PIN_NAMES)),
        salt=draw(st.sampled_from(SALTS)),
        adapter=draw(st.sampled_from(("", "", "", "poet"))),
        peer=draw(st.integers(0, 2)),
        pause_ms=draw(st.sampled_from((0, 0, 2, 8))),
    )


def crowds(vocabulary: Vocabulary, *, size: int) -> Any:
    """``size`` requests, and operations among them."""
    each = asks(vocabulary)
    return st.tuples(st.lists(each, min_size=size, max_size=size), st.lists(st.tuples(st.integers(0, size), ops()), max_size=5)).map(_mixed)


def _mixed(drawn: tuple[list[Ask], list[tuple[int, Op]]]) -> list[Ask | Op]:
    items: list[Ask | Op] = list(drawn[0])
    for place, op in sorted(drawn[1], key=lambda entry: -entry[0]):
        items.insert(place, op)
    return items
