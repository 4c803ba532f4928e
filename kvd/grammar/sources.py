"""From a constraint, as a client writes it, to a grammar in the library's form."""

from __future__ import annotations

import json
import re
from typing import Any

from kvd.grammar.errors import GrammarError
from kvd.types import Constraint

_MAX_GBNF_CHARS = 64 << 10
_MAX_GBNF_WORK = 10_000_000
"""Rules times characters. The conversion holds the interpreter and looks at all rules once for each that leads to another: this is half a second at most."""

KINDS = ("json_schema", "regex", "choice", "lark", "json")

_CONTROL = re.compile("[\x7f-\x9f]")
_WHITESPACE = r"(?: |\n[ \t]{0,64})"
"""Between the tokens of JSON: a space, or a line break and an indentation. Without a bound small models write white space for ever.

A schema says otherwise by ``"x-guidance": {"whitespace_pattern": …}``."""


def grammar_of(constraint: Constraint) -> str:
    """The library's text of a grammar, which may still be wrong.

    Raises:
        GrammarError: the constraint is of no known kind, has no source or too many, or its JSON is none.
    """
    kind, source = constraint.kind, constraint.source
    if kind == "json":
        return _json_grammar({})
    if kind == "choice":
        return _choice(source)
    if kind not in KINDS:
        raise GrammarError(f"constraint is {kind!r:.40}; it must be one of {', '.join(KINDS)}")
    if len(source) != 1 or not source[0].strip():
        raise GrammarError(f"a constraint of kind {kind} has one source that is not empty")
    from llguidance import LLMatcher, regex_to_lark

    if kind == "regex":
        return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(source[0], use_ascii='d')}/"))
    if kind == "lark":
        return str(LLMatcher.grammar_from_lark(_lark(source[0])))
    return _json_grammar(_schema(source[0]))


def _json_grammar(schema: Any) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), defaults={"whitespace_pattern": _WHITESPACE}))


def _schema(source: str) -> Any:
    """The library puts a schema's text into its own JSON, so that it must be JSON and nothing else."""
    try:
        schema = json.loads(source, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError(f"the JSON schema is {source.strip():.40}; it must be an object, or true")
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, dict):
        raise GrammarError(f"the JSON schema's x-guidance is {json.dumps(guidance):.40}; it must be an object")
    return schema


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _lark(source: str) -> str:
    """A Lark grammar, of one in llama.cpp's GBNF too, whose rules are written with ``::=``."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark, is_lark_syntax

    if "::=" not in source or is_lark_syntax(source):
        return source
    num_rules, num_chars = source.count("::="), len(source)
    if num_chars > _MAX_GBNF_CHARS or num_rules * num_chars > _MAX_GBNF_WORK:
        raise GrammarError(
            f"the grammar is in GBNF for its ::=, and has {num_rules} rules in {num_chars} characters; at most {_MAX_GBNF_CHARS} characters, "
            f"and rules times characters up to {_MAX_GBNF_WORK}, are converted: write it in Lark instead"
        )
    try:
        return gbnf_to_lark(source)
    except (GbnfToLarkError, IndexError, ValueError, RecursionError) as error:
        raise GrammarError(f"the grammar, read as GBNF for its ::=, is wrong: {error}") from error


def _choice(alternatives: tuple[str, ...]) -> str:
    if not alternatives or "" in alternatives:
        raise GrammarError("a constraint of kind choice has one alternative or more, none of them empty")
    from llguidance import LLMatcher

    # one terminal: as rules of their own, some thousand alternatives would exceed the library's items of a row
    return str(LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(_lark_string, alternatives))))


def _lark_string(text: str) -> str:
    """Lark's strings are JSON's but that no control character may stand in them as it is."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))
