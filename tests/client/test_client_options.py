"""Options that no request can be made of, and what comes back as plain values where the wire leaves something out."""

from __future__ import annotations

import msgspec
import pytest
from kvd_client.errors import BadRequest
from kvd_client.protocol.messages import Usage as WireUsage
from kvd_client.requests import generate_message
from kvd_client.results import Usage


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is empty: no token could be sampled; leave it out"),
        ({"allowed_token_ids": iter(())}, "allowed_token_ids is empty"),
        ({"length_penalty": 2.0}, "length_penalty is for beam search: give beam_width"),
        ({"length_penalty": 2.0, "early_stopping": True}, "length_penalty and early_stopping are for beam search"),
        ({"speculation": "off", "num_draft": 3}, "num_draft is for drafts, and speculation is off"),
        ({"speculation": "off", "num_draft": 3, "draft_acceptance": "coupled"}, "num_draft and draft_acceptance are for drafts"),
        ({"n": 2.0}, "n is 2.0; it must be an int"),
        ({"n": 0}, "n is 0; it must be at least 1"),
        ({"window_tokens": "8"}, "window_tokens is '8'; it must be an int"),
        ({"window_tokens": 0}, "window_tokens is 0; it must be at least 1"),
    ],
)
def test_what_makes_no_request_is_refused_in_words_for_it(options, words):
    with pytest.raises(BadRequest, match=words):
        generate_message("text", stream=False, options=options)


@pytest.mark.parametrize("ids", [None, [5], (5, 6)])
def test_an_allow_list_is_sent_as_it_is(ids):
    message = generate_message("text", stream=False, options={"allowed_token_ids": ids, "banned_token_ids": []})
    assert message.sampling.allowed_token_ids == tuple(ids or ())


def test_usage_has_a_plain_number_for_whatever_the_wire_leaves_out():
    assert WireUsage().drafted_tokens is msgspec.UNSET
    assert msgspec.structs.asdict(Usage.of(WireUsage())) == dict.fromkeys(WireUsage.__struct_fields__, 0)
    numbers = {name: number for number, name in enumerate(WireUsage.__struct_fields__, 1)}
    assert msgspec.structs.asdict(Usage.of(WireUsage(**numbers))) == numbers
