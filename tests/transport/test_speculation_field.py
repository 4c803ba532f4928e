"""``speculation`` at the edge and in the client: words, numbers, and what does not go together."""

from __future__ import annotations

import pytest
from kvd_client.drafting import take_speculation
from kvd_client.errors import BadRequest
from kvd_client.protocol.messages import Generate, Sampling, Speculation
from kvd_client.requests import generate_message

from kvd import types
from kvd.commands import RequestUsage
from kvd.transport.drafting import check_speculation, drafted, speculation
from kvd.transport.errors import RequestError


def message(seed=None, **fields):
    wanted = Speculation(**fields) if fields else None
    return Generate(request_id=bytes(16), input="text", sampling=Sampling(seed=seed), speculation=wanted)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mode": "off"},
        {"num_draft": 32},
        {"mode": "ngram", "num_draft": 32},
        {"mode": "draft"},
        {"mode": "auto", "acceptance": "rejection"},
    ],
    ids=str,
)
def test_what_can_be_asked_for(fields):
    check_speculation(message(**fields))
    check_speculation(message(seed=3, **{**fields, "acceptance": "coupled"} if fields else {}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mode": "fast"}, "the mode 'fast'; it must be one of auto, off, ngram, draft"),
        ({"mode": "ngram", "acceptance": "any"}, "it must be one of coupled, rejection"),
        ({"num_draft": 33}, "num_draft 33; it must be from 0 to 32"),
        ({"num_draft": -1}, "it must be from 0 to 32"),
        ({"acceptance": "rejection", "seed": 0}, "rejection and seed don't go together"),
    ],
    ids=str,
)
def test_what_can_not(fields, says):
    with pytest.raises(RequestError, match="speculation") as caught:
        check_speculation(message(**fields))
    assert says in str(caught.value)


def test_the_engine_gets_what_was_asked_for():
    assert speculation(None) is None
    assert speculation(Speculation(mode="ngram", num_draft=3, acceptance="rejection")) == types.Speculation("ngram", 3, "rejection")
    assert drafted(RequestUsage()) == {}
    assert drafted(RequestUsage(drafted_tokens=5)) == {"drafted_tokens": 5, "accepted_tokens": 0}


def test_options_of_the_client():
    assert take_speculation({}) is None
    assert take_speculation({"speculation": None}) is None
    fields = {"speculation": "ngram", "num_draft": 5, "n": 2}
    assert take_speculation(fields) == Speculation(mode="ngram", num_draft=5)
    assert fields == {"n": 2}
    for fields in ({"draft_acceptance": "rejection"}, {"num_draft": 5}, {"speculation": None, "num_draft": 5}):
        wish = take_speculation(dict(fields))
        assert (wish.mode, speculation(wish).mode) == ("", ""), "they say how, not whether"
        assert (wish.num_draft, wish.acceptance) == (fields.get("num_draft", 0), fields.get("draft_acceptance", "coupled"))
    with pytest.raises(BadRequest, match="num_draft is for drafts, and speculation is off"):
        take_speculation({"speculation": "off", "num_draft": 3})
    sent = generate_message("text", stream=True, options={"speculation": "off"})
    assert sent.speculation == Speculation(mode="off")
