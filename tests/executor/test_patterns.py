"""Expressions of strangers: what they match, and that none takes long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.executor.patterns import PatternError, Patterns

NAME = "model.layers.17.self_attn.q_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:.*\.(?:self_attn|mlp)\.(?:q_proj|v_proj|gate_proj))\Z",
        r".*\.[^.]*\.(\d+)\.",
        r"(.*\.)?(layers.1[67].self_attn.q_proj)$",
        r"(?:.*decoder.*(SelfAttention|EncDecAttention).*(q|v)|.*layers.*q_proj)",
        r"model\.layers\.(0|1|2|3|4|5|6|7|8|9|10|11|12|13|14|15|16|17)\.self_attn\.(q|k|v|o)_proj",
        r"(?i:MODEL)\.(?P<part>layers)\.\d{1,3}(?=\.)(?!x).*+",
        r"(?>model)(x)?(?(1)a|\.)[a-z]+?\.",
    ],
)
def test_what_people_write_matches_as_ever(pattern):
    found, expected = Patterns().match(pattern, NAME), re.match(pattern, NAME)
    assert (found and found.group()) == (expected and expected.group())


@pytest.mark.parametrize(
    "pattern",
    [
        "(([a-z_.0-9]+)*)*!",
        "(a|a)*b",
        "(a?){30}b",
        "a?" * 30 + "b",
        "(?:ab|ac)?" * 30 + "!",
        "(?:mo|m)" * 25,
        ".*" * 9 + "!",
        "(?=.*.*.*.*.*!)",
        "(x)?(?(1)a|(.*.*.*.*.*!))",
        "(?:){1000000000}",
        "(?:(?=m)){1000000000}",
        "x" * 1001,
        "(",
        "(" * 500 + ")" * 500,
        "a{99999999999999999999}",
    ],
)
def test_what_could_take_long_or_is_none_is_refused_at_once(pattern):
    began_s = time.process_time()
    with pytest.raises(PatternError):
        Patterns().match(pattern, NAME)
    assert time.process_time() - began_s < 1


def test_there_are_so_many_at_most_and_each_is_compiled_once():
    patterns = Patterns()
    for _ in range(2):
        for number in range(4096):
            patterns.match(f"a{number}", NAME)
    with pytest.raises(PatternError, match="more than 4096"):
        patterns.match("b", NAME)


PIECES = st.sampled_from(["m", "o", ".", "[a-z]", "(", ")", "(?:", "|", "*", "+", "?", "{3}", "{2,}", ".*", "!", "(?=", "\\d", "$"])


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECES, max_size=25))
def test_no_expression_takes_long(pieces):
    pattern = "".join(pieces)
    began_s = time.process_time()
    try:
        found = Patterns().match(pattern, NAME)
    except PatternError:
        pass
    else:
        assert (found is None) == (re.match(pattern, NAME) is None)
    assert time.process_time() - began_s < 1
