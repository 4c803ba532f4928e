"""What may stand for token ids, wherever a caller gives some: prompts, pins, what may be sampled, what ends an answer."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from kvd_client import operations
from kvd_client.errors import BadRequest
from kvd_client.many import prompt_bodies
from kvd_client.protocol import codec
from kvd_client.requests import generate_message, prompt_body
from kvd_client.results import pack_tokens

NO_IDS = [
    b"ab",
    bytearray(b"ab"),
    memoryview(b"ab"),
    memoryview(array("I", [1, 2])),
    [True, False],
    (1, 2, True),
    [1.0, 2.0],
    [1, 2.5],
    array("d", [1.0]),
    ["a"],
    [1, None],
    [[1], [2]],
    {1: "a"},
]


@pytest.mark.parametrize("ids", [[1, 256], (1, 256), range(1, 257, 255), array("I", [1, 256]), array("q", [1, 256])], ids=repr)
def test_whole_numbers_in_an_order_are_ids(ids: Any) -> None:
    assert prompt_body(ids) == ("ids", pack_tokens([1, 256]))
    assert operations.detokenize(ids).bodies == (pack_tokens([1, 256]),)
    assert generate_message("ids", stream=False, options={"stop_token_ids": ids}).stop_token_ids == (1, 256)


def test_what_is_read_once_is_read_once() -> None:
    assert prompt_body(iter([1, 256])) == ("ids", pack_tokens([1, 256]))  # type: ignore[arg-type]  # more than is promised


def test_no_ids_are_a_prompt_for_the_daemon_to_judge() -> None:
    assert prompt_body([]) == ("ids", b"")


@pytest.mark.parametrize("ids", ["\x05\0\0\0", "", "abcd", None, 5], ids=repr)
def test_text_is_no_ids_to_tell_the_text_of(ids: Any) -> None:
    with pytest.raises(BadRequest, match=r"the token ids can't be sent: \w+ is not a sequence of token ids"):
        operations.detokenize(ids)


@pytest.mark.parametrize("ids", [[-1], [1 << 32]])
def test_ids_that_have_no_place_on_the_wire(ids: list[int]) -> None:
    for refused in (prompt_body, operations.detokenize):
        with pytest.raises(BadRequest, match="can't be sent"):
            refused(ids)  # type: ignore[operator]


@pytest.mark.parametrize("token_id", [True, 1.0, b"1", None, "x"], ids=repr)
def test_a_bias_is_for_a_token_id(token_id: Any) -> None:
    for bias in ({token_id: 1.0}, [(token_id, 1.0)]):
        with pytest.raises(BadRequest, match="logit_bias"):
            generate_message("ids", stream=False, options={"logit_bias": bias})
    message = generate_message("ids", stream=False, options={"logit_bias": {5: 1, "6": -2}})
    assert message.sampling.logit_bias == ((5, 1.0), (6, -2.0))


@pytest.mark.parametrize("ids", NO_IDS)
def test_what_is_merely_like_numbers_is_refused_everywhere(ids: Any) -> None:
    for refused in (
        lambda: prompt_body(ids),
        lambda: prompt_bodies([[1], ids], 8),
        lambda: operations.detokenize(ids),
        lambda: generate_message("ids", stream=False, options={"stop_token_ids": ids}),
        lambda: generate_message("ids", stream=False, options={"allowed_token_ids": ids}),
        lambda: generate_message("ids", stream=False, options={"banned_token_ids": ids}),
    ):
        with pytest.raises(BadRequest, match="token id"):
            refused()


def test_the_message_says_what_is_wrong() -> None:
    with pytest.raises(BadRequest, match="bytes is not a sequence of token ids; of text, give a str"):
        prompt_body(b"ab")
    with pytest.raises(BadRequest, match="token id 2 is True, of type bool; it must be an int"):
        prompt_body([1, 2, True])
    with pytest.raises(BadRequest, match="can't be sent"):
        prompt_bodies([5], 8)  # type: ignore[list-item]


@pytest.mark.torch
def test_numbers_of_numpy_and_torch() -> None:
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    packed = ("ids", pack_tokens([1, 256]))
    for ids in (
        np.array([1, 256]),
        np.array([1, 256], np.uint16),
        [np.int64(1), 256],
        torch.tensor([1, 256]),
        list(torch.tensor([1, 256])),
    ):
        assert prompt_body(ids) == packed
        assert operations.detokenize(ids).bodies == packed[1:]
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
            message = generate_message("ids", stream=False, options={name: ids})
            sent: Any = codec.decode_client(codec.encode(message, b""))[0]
            assert getattr(sent if name == "stop_token_ids" else sent.sampling, name) == (1, 256)
        bias = generate_message("ids", stream=False, options={"logit_bias": [(each, np.float32(2)) for each in ids]}).sampling.logit_bias
        assert bias == ((1, 2.0), (256, 2.0))
        assert {type(part) for pair in bias for part in pair} == {int, float}
    for ids in (
        np.array([True]),
        [np.bool_(1)],
        np.array([1.0]),
        [np.float32(1)],
        torch.tensor([True]),
        [torch.tensor(True)],
        torch.ones(2),
    ):
        with pytest.raises(BadRequest, match=r"token id 0|can't be sent"):
            prompt_body(ids)
