"""Compiled constraints against what they mean: what the masks allow is what can still become a match, and all of it."""

from __future__ import annotations

import json
import random
import re
import sys

import pytest

from kvd.config import GrammarConfig
from kvd.grammar.compiler import GrammarCompiler
from kvd.grammar.errors import GrammarError
from kvd.grammar.state import CompiledGrammar, GrammarState
from kvd.grammar.vocabulary import Vocabulary
from kvd.types import Constraint, ErrorCode

pytestmark = pytest.mark.grammar

EOS = 256


def byte_vocabulary() -> Vocabulary:
    token_bytes = [bytes([byte]) for byte in range(256)] + [b""]
    return Vocabulary(
        token_bytes=token_bytes, special_texts={}, eos_token_ids=(EOS,), vocab_size=260, encode=lambda text: list(text.encode())
    )


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(GrammarConfig(constraint_timeout_s=60.0), byte_vocabulary, now_s=lambda: 0.0, on_done=lambda: None)


def compile_now(compiler: GrammarCompiler, constraint: Constraint) -> CompiledGrammar | tuple[ErrorCode, str]:
    ticket = compiler.begin(constraint)
    assert ticket is not None
    while (result := compiler.poll(ticket)) is None:
        pass
    return result


def compiled(compiler: GrammarCompiler, constraint: Constraint) -> CompiledGrammar:
    result = compile_now(compiler, constraint)
    assert isinstance(result, CompiledGrammar), result
    return result


def allowed(compiler: GrammarCompiler, *states: GrammarState, drafts: tuple[tuple[int, ...], ...] | None = None) -> list[set[int]]:
    words = compiler.masks(states, drafts or ((),) * len(states))
    size = 4 * -(-260 // 32)
    masks = [words[start : start + size] for start in range(0, len(words), size)]
    return [{bit for bit in range(8 * size) if mask[bit // 8] >> bit % 8 & 1} for mask in masks]


def walk(compiler: GrammarCompiler, grammar: CompiledGrammar, rng: random.Random, *, most: int = 400) -> bytes | None:
    """A random output that the masks allow; None where it didn't end."""
    state, output = grammar.start(), bytearray()
    while len(output) < most:
        (choices,) = allowed(compiler, state)
        assert state.problem == ""
        assert choices, "there is always a token, or the end"
        assert (EOS in choices) == state.is_complete
        token_id = rng.choice(sorted(choices))
        state.advance(token_id)
        assert state.problem == ""
        if token_id == EOS:
            assert state.is_over
            return bytes(output)
        output.append(token_id)
        if state.is_over:
            return bytes(output)
    return None


def takes(grammar: CompiledGrammar, text: str) -> bool:
    state, data = grammar.start(), list(text.encode())
    return state.num_valid([*data, EOS]) == len(data) + 1


@pytest.mark.parametrize(
    "pattern",
    [r"[a-c]{2,5}", r"(yes|no|may ?be)", r"\d{1,3}(\.\d{1,3}){3}", r"é[^\x00-\x7F]{1,2}!", r"(a|b)*c", r"a/b\/[/]", "x\ny", r"^[+-]?\d+$"],
)
def test_what_a_regex_allows_matches_it(compiler: GrammarCompiler, pattern: str) -> None:
    grammar = compiled(compiler, Constraint("regex", (pattern,)))
    outputs = [walk(compiler, grammar, random.Random(seed)) for seed in range(30)]
    texts = [output.decode() for output in outputs if output is not None]
    assert texts
    assert all(re.fullmatch(pattern, text) for text in texts), texts


PIECES = [
    b"",
    *(bytes([byte]) for byte in range(256)),
    b"the",
    b" the",
    b" Of",
    b"and ",
    b"ing",
    b"a b",
    b"x" * 30,
    b"y" * 31,
    b"a1",
    b"no.",
    b'e"',
    "é ".encode(),
    b"\n\n",
]
"""Tokens of which the library takes many at once, as far as it can."""


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"[a-z A-Z0-9.,]{40}", "a bc, the 19 "),
        (r"[a-zA-Z ]{0,31}!", "and then"),
        (r"[a-zA-Z]+ [0-9a-z ]*", "of the 2"),
        (r"[^\n]*\n(the|THE) [a-z]{1,29}", "x!\nthe "),
        (r"(?s:.)*END", 'any "'),
    ],
)
def test_a_mask_is_what_each_token_by_itself_says(pattern: str, text: str) -> None:
    vocabulary = Vocabulary(
        token_bytes=PIECES,
        special_texts={0: "<end>"},
        eos_token_ids=(0,),
        vocab_size=len(PIECES),
        encode=lambda text: [1 + byte for byte in text.encode()],
    )
    compiler = GrammarCompiler(GrammarConfig(constraint_timeout_s=60.0), lambda: vocabulary, now_s=lambda: 0.0, on_done=lambda: None)
    state = compiled(compiler, Constraint("regex", (pattern,))).start()
    for token_id in [1 + byte for byte in text.encode()]:
        words = compiler.masks([state], [()])
        mask = {bit for bit in range(8 * len(words)) if words[bit // 8] >> bit % 8 & 1}
        assert mask == {each for each in range(len(PIECES)) if (state.is_complete if each == 0 else state.num_valid([each]) == 1)}
        state.advance(token_id)
        assert state.problem == ""


AWKWARD = (
    'with "quotes"',
    "back\\slash /slash/",
    "new\nline\ttab",
    "é€😀",
    "a|b(c)*",
    "[x]",
    "start: y",
    "yes",
    "yes, indeed",
    "\x00\x7f\x85",
    "\u2028",
)


def test_a_choice_is_each_of_its_texts_and_nothing_else(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, Constraint("choice", AWKWARD))
    assert all(takes(grammar, text) for text in AWKWARD)
    assert not takes(grammar, "yes,")
    assert {output.decode() for seed in range(120) if (output := walk(compiler, grammar, random.Random(seed)))} <= set(AWKWARD)


def test_a_text_that_begins_another_may_end_or_go_on(compiler: GrammarCompiler) -> None:
    state = compiled(compiler, Constraint("choice", ("yes", "yes, indeed"))).start()
    for byte in b"yes":
        assert not state.is_complete
        state.advance(byte)
    assert state.is_complete
    assert not state.is_over
    assert allowed(compiler, state) == [{EOS, ord(",")}]
    state.advance(EOS)
    assert state.is_over


def test_thousands_of_texts_are_a_choice_like_another(compiler: GrammarCompiler) -> None:
    texts = {f"item{number}" for number in range(6000)}
    grammar = compiled(compiler, Constraint("choice", tuple(sorted(texts))))
    assert {output.decode() for seed in range(20) if (output := walk(compiler, grammar, random.Random(seed)))} <= texts
    assert takes(grammar, "item5999")
    assert not takes(grammar, "item6000")


def test_a_thousand_optional_properties_are_not_too_many(compiler: GrammarCompiler) -> None:
    schema = {"properties": {f"p{number}": {"type": "boolean"} for number in range(950)}, "additionalProperties": False, "type": "object"}
    grammar = compiled(compiler, Constraint("json_schema", (json.dumps(schema),)))
    state = grammar.start()
    for byte in b'{"p0": true, "p500": false, "p949": true}':
        state.advance(byte)
    assert state.problem == ""
    assert state.is_over
    assert not takes(grammar, '{"p950": true}')


def test_a_limit_is_not_taken_for_a_forbidden_token(compiler: GrammarCompiler) -> None:
    schema = {"properties": {f"p{number}": {"type": "boolean"} for number in range(1500)}, "additionalProperties": False, "type": "object"}
    state = compiled(compiler, Constraint("json_schema", (json.dumps({"type": "array", "items": schema}),))).start()
    for byte in b'[{"p0":':
        state.advance(byte)
    assert "items" in state.problem
    assert not state.has_strayed
    state = compiled(compiler, Constraint("choice", ("left", "right"))).start()
    state.advance(ord("x"))
    assert state.has_strayed


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def test_what_a_schema_allows_validates(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, Constraint("json_schema", (json.dumps(SCHEMA),)))
    values = [json.loads(output) for seed in range(40) if (output := walk(compiler, grammar, random.Random(seed), most=3000)) is not None]
    assert len(values) > 30
    for value in values:
        assert value.keys() >= {"name", "age", "tags"}
        assert value.keys() <= SCHEMA["properties"].keys()
        assert len(value["name"]) <= 8
        assert 0 <= value["age"] <= 150
        assert len(value["tags"]) <= 2
        assert set(value["tags"]) <= {"red", "green"}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a": [1, 2.5e3, null, true, "x"]}', True),
        ('{\n  "a": 1\n}', True),
        ("[]", True),
        ("12", True),
        ('{"a":  1}', False),  # white space is bounded: a space, or a line break and an indentation
        ("[\n\n1]", False),
        (" 1", False),
        ("{'a': 1}", False),
        ("nul", False),
    ],
)
def test_json_is_any_json_with_bounded_white_space(compiler: GrammarCompiler, text: str, fits: bool) -> None:
    assert takes(compiled(compiler, Constraint("json")), text) == fits


def test_a_schema_names_its_own_white_space(compiler: GrammarCompiler) -> None:
    schema = {"x-guidance": {"whitespace_pattern": "[ ]{0,9}"}, "type": "array", "items": {"type": "integer"}}
    grammar = compiled(compiler, Constraint("json_schema", (json.dumps(schema),)))
    assert takes(grammar, "[1,     2]")
    assert not takes(grammar, "[1,\n2]")


def test_lark_may_embed_json_and_regex(compiler: GrammarCompiler) -> None:
    lark = 'start: "call(" NAME "," args ")"\nNAME: /[a-z]{1,6}/\nargs: %json {"type": "object"}\n'
    grammar = compiled(compiler, Constraint("lark", (lark,)))
    assert takes(grammar, 'call(add,{"x":1})')
    assert not takes(grammar, "call(add,1)")


def test_a_grammar_in_gbnf_is_taken_as_well(compiler: GrammarCompiler) -> None:
    gbnf = 'root ::= "yes" | "no" ("," [a-z]+)? | num\nnum ::= [0-9] [0-9]*\n'
    grammar = compiled(compiler, Constraint("lark", (gbnf,)))
    assert all(takes(grammar, text) for text in ("yes", "no", "no,abc", "123"))
    assert not any(takes(grammar, text) for text in ("yes,abc", "no,", "", "12a"))


def test_an_operator_of_gbnf_within_lark_is_text(compiler: GrammarCompiler) -> None:
    assert takes(compiled(compiler, Constraint("lark", ('start: "a ::= " /[0-9]/',))), "a ::= 1")


REFUSED = [
    (Constraint("json_schema", ('{"type":',)), "not JSON"),
    (Constraint("json_schema", ('{}]}, {"lark_grammar": "start: /.*/"}',)), "not JSON"),
    (Constraint("json_schema", ('{"maximum": NaN}',)), "NaN"),
    (Constraint("json_schema", ("[1]",)), "must be an object"),
    (Constraint("json_schema", ("[" * 100_000,)), "not JSON"),
    (Constraint("json_schema", ('{"type": "objekt"}',)), "objekt"),
    (Constraint("json_schema", ('{"if": {}, "not": {}}',)), "Unimplemented keys"),
    (Constraint("json_schema", ('{"$ref": "file:///etc/passwd"}',)), "not present"),
    (Constraint("json_schema", ('{"$ref": "#"}',)), "matches nothing"),
    (Constraint("json_schema", ('{"x-guidance": 5}',)), "x-guidance is 5"),
    (Constraint("json_schema", ('{"x-guidance": null}',)), "x-guidance is null"),
    (Constraint("regex", ("a{1000000}",)), "too complex"),
    (Constraint("lark", ('root ::= "a"{99999999}',)), "too complex"),
    (Constraint("lark", ("root ::= " + '("a" | "b")* ' * 8000,)), "104009 characters; at most 65536"),
    (Constraint("lark", ("root ::= r0\n" + "".join(f'r{number} ::= "x"\n' for number in range(2000)),)), "2001 rules"),
    (Constraint("json_schema", ("false",)), "must be an object"),
    (Constraint("regex", ("[a-z",)), "unclosed"),
    (Constraint("regex", ("(?=a)b",)), "look-ahead"),
    (Constraint("regex", (" ",)), "not empty"),
    (Constraint("regex", ("a", "b")), "one source"),
    (Constraint("lark", ("start: foo",)), "foo"),
    (Constraint("lark", ("start: start",)), "matches nothing"),
    (Constraint("lark", ("start: <|im_end|>",)), "im_end"),
    (Constraint("lark", ("root ::= [a-z",)), "GBNF"),
    (Constraint("lark", ("root ::= " + "(" * 5000,)), "GBNF"),
    (Constraint("choice"), "one alternative"),
    (Constraint("choice", ("a", "")), "one alternative"),
    (Constraint("bnf", ("x",)), "one of"),
]


@pytest.mark.parametrize(("constraint", "reason"), REFUSED, ids=[f"{each.kind}-{reason}" for each, reason in REFUSED])
def test_what_is_wrong_is_said(compiler: GrammarCompiler, constraint: Constraint, reason: str) -> None:
    result = compile_now(compiler, constraint)
    assert isinstance(result, tuple)
    code, message = result
    assert code is ErrorCode.BAD_REQUEST
    assert reason in message
    assert len(message) < 800
    assert "backtrace" not in message


def test_masks_after_drafted_tokens_are_those_of_a_state_that_took_them(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, Constraint("json_schema", (json.dumps(SCHEMA),)))
    plain, drafting = grammar.start(), grammar.start()
    draft = list(b'{"name": "')
    assert drafting.num_valid([*draft, ord("\n")]) == len(draft)
    one_by_one = []
    for token_id in draft:
        one_by_one += allowed(compiler, plain)
        plain.advance(token_id)
    one_by_one += allowed(compiler, plain)
    other = grammar.start()
    assert allowed(compiler, drafting, other, drafts=(tuple(draft), ())) == [*one_by_one, one_by_one[0]]
    assert allowed(compiler, drafting) == [one_by_one[0]], "the state is where it was"


def test_masks_after_a_draft_that_ends_the_text(compiler: GrammarCompiler) -> None:
    state = compiled(compiler, Constraint("regex", ("ab",))).start()
    assert state.num_valid([97, 98, EOS]) == 3
    assert allowed(compiler, state, drafts=((97, 98),)) == [{97}, {98}, {EOS}]


def test_forced_tokens_spell_what_must_follow(compiler: GrammarCompiler) -> None:
    state = compiled(compiler, Constraint("json_schema", (json.dumps(SCHEMA),))).start()
    for byte in b'{"':
        state.advance(byte)
    assert bytes(state.forced(64)) == b'name"'
    assert bytes(state.forced(2)) == b"na"


def test_states_of_one_grammar_go_their_own_ways(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, Constraint("choice", ("left", "right")))
    one, two = grammar.start(), grammar.start()
    one.advance(ord("l"))
    two.advance(ord("r"))
    assert allowed(compiler, one, two) == [{ord("e")}, {ord("i")}]


def test_a_forbidden_token_is_a_problem_of_its_sequence_alone(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, Constraint("choice", ("left", "right")))
    one, two = grammar.start(), grammar.start()
    one.advance(ord("x"))
    assert "x" in one.problem
    assert two.problem == ""
    assert allowed(compiler, one, two)[1] == {ord("l"), ord("r")}


HOSTILE = [
    Constraint("regex", (r"(a|b)*a(a|b){300}c",)),
    Constraint("regex", (r"((a{1,1000}){1,1000}){1,1000}",)),
    Constraint("regex", (r"(\p{L}{1,1000}\p{N}){1,1000}",)),
    Constraint("regex", ("(" * 5000,)),
    Constraint("regex", ("(" * 900 + "a" + ")*" * 900,)),
    Constraint(
        "json_schema", (json.dumps({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(6)]} for i in range(8)]}),)
    ),
    Constraint("json_schema", (json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 100_000, "maxItems": 1_000_000}),)),
    Constraint("json_schema", ('{"type":"array","items":' * 900 + "{}" + "}" * 900,)),
    Constraint("json_schema", (json.dumps({"enum": [f"value {number}" for number in range(5000)]}),)),
    Constraint("lark", ('start: s\ns: s s s | s s | "a" | ""\n',)),
    Constraint("lark", ("start: A\nA: /(.*a.*){10}/ & /(.*b.*){10}/ & ~/.*ccc.*/ & /(.*d.*){10}/\n",)),
    Constraint("lark", ('start: (("a" | "b"){1,1000}){1,1000}\n',)),
    Constraint("lark", ("%import nowhere.at.all\nstart: all",)),
    Constraint("choice", tuple("x" * number for number in range(1, 600))),
]


@pytest.mark.parametrize("constraint", HOSTILE, ids=lambda each: f"{each.kind}-{each.source[0][:24]}")
def test_a_source_made_to_hurt_is_compiled_or_refused_and_hurts_nobody(compiler: GrammarCompiler, constraint: Constraint) -> None:
    result = compile_now(compiler, constraint)
    if isinstance(result, CompiledGrammar):
        state, rng = result.start(), random.Random(1)
        for _ in range(40):
            (choices,) = allowed(compiler, state)
            if state.problem or state.is_over:
                break
            state.advance(rng.choice(sorted(choices)))
        assert "backtrace" not in state.problem
    else:
        assert result[0] is ErrorCode.BAD_REQUEST
    assert takes(compiled(compiler, Constraint("regex", ("[a-z]+",))), "fine")


def test_a_model_without_an_end_takes_no_constraints() -> None:
    vocabulary = Vocabulary(token_bytes=[b"a"], special_texts={}, eos_token_ids=(), vocab_size=1, encode=lambda _: [])
    lame = GrammarCompiler(GrammarConfig(), lambda: vocabulary, now_s=lambda: 0.0, on_done=lambda: None)
    with pytest.raises(GrammarError, match="ends a sequence"):
        lame.prepare()
    code, message = compile_now(lame, Constraint("json"))
    assert (code, "ends a sequence" in message) == (ErrorCode.BAD_REQUEST, True)


def test_without_the_library_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    lame = GrammarCompiler(GrammarConfig(), byte_vocabulary, now_s=lambda: 0.0, on_done=lambda: None)
    with pytest.raises(GrammarError, match="llguidance"):
        lame.prepare()


def test_ids_that_only_the_model_or_only_the_tokenizer_has_are_never_allowed() -> None:
    token_bytes = [bytes([byte]) for byte in range(256)] + [b"", b"beyond"]
    for vocab_size in (200, 258, 300):
        vocabulary = Vocabulary(
            token_bytes=token_bytes,
            special_texts={256: "<|end|>"},
            eos_token_ids=(10,),
            vocab_size=vocab_size,
            encode=lambda text: list(text.encode()),
        )
        compiler = GrammarCompiler(GrammarConfig(), lambda vocabulary=vocabulary: vocabulary, now_s=lambda: 0.0, on_done=lambda: None)
        state = compiled(compiler, Constraint("regex", ("[^\n]+",))).start()
        words = compiler.masks([state], [()])
        assert len(words) == 4 * vocabulary.num_words
        bits = {bit for bit in range(8 * len(words)) if words[bit // 8] >> bit % 8 & 1}
        assert max(bits) < min(vocab_size, 258)
        assert ord("x") in bits
        assert 256 not in bits
