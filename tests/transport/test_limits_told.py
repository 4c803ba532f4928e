"""One limit is told the same way wherever it is met, with what sets it."""

from __future__ import annotations

import pytest
from kvd_client.protocol.messages import Beam, Generate

from kvd.transport.choosing import check_choosing
from kvd.transport.errors import RequestError
from kvd.transport.validation import check_fewest, check_prompt


@pytest.mark.parametrize("width", [-1, 0, 17, 1025])
def test_every_width_beyond_is_told_the_daemons_limit(width):
    beam = Generate(request_id=bytes(16), input="text", beam=Beam(width=width))
    with pytest.raises(RequestError, match=f"width {width}; it must be from 1 to 16$"):
        check_choosing(beam, max_choices=16, vocab_size=1000)
    with pytest.raises(RequestError, match=f"width {width}; it must be from 1 to 8$"):
        check_choosing(beam, max_choices=16, vocab_size=16)


def test_a_length_that_the_pool_sets_is_not_the_models():
    words = r"1088, which is what the KV pool holds \(the model takes 8192\): give the daemon more kv_memory"
    with pytest.raises(RequestError, match=f"with one of output it exceeds {words}"):
        check_prompt(2000, None, 1088, model_len=8192)
    with pytest.raises(RequestError, match=f"together they exceed {words}"):
        check_prompt(1000, 89, 1088, model_len=8192)
    with pytest.raises(RequestError, match=f"at least 2000 tokens; with one of output it exceeds {words}"):
        check_fewest(2000, max_tokens=None, max_model_len=1088, model_len=8192)
    with pytest.raises(RequestError, match=r"exceeds 8192$"):
        check_prompt(9000, None, 8192)
