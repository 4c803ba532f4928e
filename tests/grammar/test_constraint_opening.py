"""The grammar room as the daemon opens it: over a model's text side, with its answers in the inbox."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from kvd.commands import ConstraintCompiled
from kvd.config import DaemonConfig, GrammarConfig
from kvd.constraint_opening import open_constraints, preparation, vocabulary_of
from kvd.grammar.state import CompiledGrammar
from kvd.text.errors import TokenizerError
from kvd.text.model import load_text_model
from kvd.types import Constraint, ErrorCode

pytestmark = pytest.mark.grammar


class Inbox:
    def __init__(self):
        self.commands = []

    def put_internal(self, command):
        self.commands.append(command)


class Log:
    def __init__(self):
        self.warnings = []

    def warning(self, event, **fields):
        self.warnings.append((event, fields))


def compile_now(compiler, constraint):
    ticket = compiler.begin(constraint)
    for _ in range(20_000):
        if (result := compiler.poll(ticket)) is not None:
            return result
        time.sleep(0.001)
    raise AssertionError("it never came")


def prepare(compiler, log):
    thread = preparation(compiler, log)
    thread.start()
    thread.finish(lambda: None)


def test_what_is_compiled_wakes_the_engine():
    inbox, log = Inbox(), Log()
    compiler = open_constraints(DaemonConfig(), 257, lambda: load_text_model("bytes"), inbox, time.monotonic)
    prepare(compiler, log)
    assert isinstance(compile_now(compiler, Constraint("regex", ("a+",))), CompiledGrammar)
    assert compile_now(compiler, Constraint("regex", ("[",)))[0] is ErrorCode.BAD_REQUEST
    for _ in range(20_000):  # the engine may have it before it is woken
        if len(inbox.commands) >= 2:
            break
        time.sleep(0.001)
    assert inbox.commands == [ConstraintCompiled()] * 2
    assert not log.warnings


def test_none_are_opened_where_none_are_wanted():
    config = dataclasses.replace(DaemonConfig(), grammar=GrammarConfig(constraints=False))
    assert open_constraints(config, 257, lambda: load_text_model("bytes"), Inbox(), time.monotonic) is None
    prepare(None, Log())


def test_a_text_model_that_cannot_be_read_is_a_warning_and_the_reason_of_each_refusal():
    def broken():
        raise TokenizerError("tokenizer.json: damaged")

    log = Log()
    compiler = open_constraints(DaemonConfig(), 257, broken, Inbox(), time.monotonic)
    prepare(compiler, log)
    assert log.warnings == [("no_constraints", {"reason": "tokenizer.json: damaged"})]
    code, message = compile_now(compiler, Constraint("json"))
    assert (code, "damaged" in message) == (ErrorCode.BAD_REQUEST, True)


@pytest.mark.model
def test_smollm2s_tokens_spell_what_its_tokenizer_makes_of_texts(smollm2: Path):
    text = load_text_model(str(smollm2))
    vocabulary = vocabulary_of(text, 49152)
    assert vocabulary.eos_token_ids
    for sample in ('{"name": "Zoë", "age": 3}', "  indented\n\tlines 😀", "<|im_end|> as text"):
        ids = vocabulary.encode(sample)
        assert b"".join(vocabulary.token_bytes[token_id] for token_id in ids).decode() == sample
    compiler = open_constraints(DaemonConfig(), 49152, lambda: text, Inbox(), time.monotonic)
    grammar = compile_now(compiler, Constraint("choice", ("Zoë 😀", "no")))
    state = grammar.start()
    assert state.num_valid(vocabulary.encode("Zoë 😀")) == len(vocabulary.encode("Zoë 😀"))
    forced = grammar.start()
    forced.advance(vocabulary.encode("Zoë 😀")[0])
    assert list(forced.forced(64)) == vocabulary.encode("Zoë 😀")[1:]
    end = compile_now(compiler, Constraint("lark", ("start: <|im_start|>",)))
    assert end.start().num_valid([text.special_tokens["<|im_start|>"]]) == 1
