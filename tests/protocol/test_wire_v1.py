"""Version 1 of the wire, byte for byte: what is committed under tests/data/wire-v1 decodes to these messages for ever, and is what we send.

Each file is one message, a frame a line, in hexadecimal. A new optional field gets new files; the old ones stay as they are.
"""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from kvd_client.protocol.codec import decode_client, decode_server, encode, pack_body
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import (
    Abort,
    Beam,
    Checkpoint,
    ChoiceEnd,
    ClientMessage,
    Credit,
    Detokenize,
    Drain,
    Failed,
    Finished,
    Forget,
    Generate,
    Hello,
    HelloReply,
    Limits,
    ListAdapters,
    LoadAdapter,
    Pin,
    Ping,
    Pong,
    Prefixes,
    Prompt,
    Result,
    Sampling,
    ServerMessage,
    Speculation,
    Stats,
    Status,
    Timings,
    Tokenize,
    TokenLogprob,
    Tokens,
    UnloadAdapter,
    Unpin,
    Usage,
)

DATA = Path(__file__).parent.parent / "data" / "wire-v1"
ID = bytes(range(16))
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße?"}]

CLIENT = {
    "hello": (Hello(client="kvd-client/0.1.0"), []),
    "hello-range": (Hello(protocol=(1, 3)), []),
    "generate-text": (Generate(request_id=ID, input="text"), ["Grüße".encode()]),
    "generate-ids": (Generate(request_id=ID, input="ids", text=False, max_tokens=1), [bytes.fromhex("0100000000c00000")]),
    "generate-retention": (Generate(request_id=ID, input="text", cache_priority=80, cache_ttl_s=300.0), [b"x"]),
    "generate-messages": (
        Generate(
            request_id=ID,
            input="messages",
            sampling=Sampling(
                temperature=0.5,
                top_k=40,
                top_p=0.9,
                min_p=0.05,
                repetition_penalty=1.1,
                presence_penalty=0.25,
                frequency_penalty=-0.25,
                seed=2**64 - 1,
                logprobs=5,
            ),
            n=2,
            max_tokens=64,
            min_tokens=3,
            stop=("\n\n", "Ende"),
            stop_token_ids=(2, 49151),
            ignore_eos=True,
            credit=256,
            cache_salt=b"tenant-1",
            template_args={"enable_thinking": False},
        ),
        [pack_body(CHAT)],
    ),
    "abort": (Abort(request_id=ID), []),
    "credit": (Credit(request_id=ID, num_tokens=512), []),
    "pin": (Pin(op_id=ID, name="support", input="messages", priority=80, cache_salt=b"tenant-1"), [pack_body(CHAT[:1])]),
    "pin-ttl": (Pin(op_id=ID, name="support", input="messages", ttl_s=3600.5), [pack_body(CHAT[:1])]),
    "unpin": (Unpin(op_id=ID, name="support"), []),
    "forget": (Forget(op_id=ID, tenant="acme"), []),
    "forget-prefix": (Forget(op_id=ID, cache_salt=b"tenant-1", input="messages"), [pack_body(CHAT[:1])]),
    "pin-adapter": (Pin(op_id=ID, name="support", input="text", adapter="poet"), [b"Be brief."]),
    "load_adapter": (LoadAdapter(op_id=ID, name="poet"), []),
    "unload_adapter": (UnloadAdapter(op_id=ID, name="poet"), []),
    "list_adapters": (ListAdapters(op_id=ID), []),
    "prefixes": (Prefixes(op_id=ID), []),
    "tokenize": (Tokenize(op_id=ID, input="text"), [b"hello"]),
    "detokenize": (Detokenize(op_id=ID), [bytes.fromhex("0100000000c00000")]),
    "status": (Status(op_id=ID), []),
    "stats": (Stats(op_id=ID), []),
    "generate-features": (
        Generate(
            request_id=ID,
            input="messages",
            sampling=Sampling(logit_bias=((7, -1.5),), allowed_token_ids=(1, 2, 7), banned_token_ids=(3,)),
            best_of=4,
            beam=Beam(width=4, length_penalty=2.0, early_stopping=None),
            speculation=Speculation(mode="ngram", num_draft=5, acceptance="rejection"),
            constraint="regex",
            bad_words=("dull",),
            prompt_logprobs=1,
            echo=True,
            truncate_prompt=-1,
            tools=True,
            priority=-1,
            deadline_s=2.5,
            queue_timeout_s=0.5,
            adapter="poet",
        ),
        [pack_body(CHAT), b"[0-9]+", pack_body([{"type": "function"}])],
    ),
    "checkpoint": (Checkpoint(op_id=ID), []),
    "drain": (Drain(op_id=ID, timeout_s=12.5), []),
    "ping": (Ping(nonce=7), []),
}
SERVER = {
    "hello_reply": (
        HelloReply(
            instance=ID,
            version="0.1.0",
            protocol=(1, 1),
            state="ready",
            limits=Limits(max_message_bytes=8388608, max_model_len=8192, max_choices=16, max_stop_strings=16, default_credit=1024),
            model="smollm2",
            fingerprint="ab" * 32,
            vocab_size=49152,
        ),
        [],
    ),
    "tokens": (Tokens(request_id=ID, choice=1, first_index=41), [bytes.fromhex("0100000000c00000"), "ü".encode()]),
    "tokens-logprobs": (
        Tokens(
            request_id=ID,
            choice=0,
            first_index=0,
            logprobs=(TokenLogprob(token_id=1, logprob=-0.25, top=((1, -0.25), (2, -1.5))),),
        ),
        [bytes.fromhex("01000000")],
    ),
    "finished": (
        Finished(
            request_id=ID,
            choices=(
                ChoiceEnd(choice=0, finish_reason="stop", num_tokens=64, text_tail="\n"),
                ChoiceEnd(choice=1, finish_reason="length", num_tokens=64),
            ),
            usage=Usage(prompt_tokens=1500, cached_tokens=1488, restored_tokens=1472, recomputed_tokens=16, completion_tokens=128),
            timings=Timings(queue_ms=0.5, ttft_ms=31.25, total_ms=902.5),
            seed=2**64 - 1,
        ),
        [],
    ),
    "finished-features": (
        Finished(
            request_id=ID,
            choices=(ChoiceEnd(choice=0, finish_reason="stop", num_tokens=2, cumulative_logprob=-1.5, score=-0.75),),
            usage=Usage(prompt_tokens=3, completion_tokens=2, drafted_tokens=4, accepted_tokens=1),
            timings=Timings(),
        ),
        [],
    ),
    "prompt": (
        Prompt(request_id=ID, first_position=1, logprobs=(TokenLogprob(token_id=2, logprob=-0.5),)),
        [bytes.fromhex("0100000002000000"), b"ab"],
    ),
    "failed": (Failed(code="starting", message="the daemon is rehydrating", request_id=ID, retryable=True, retry_after_s=1.5), []),
    "failed-operation": (Failed(code="pin_capacity", message="90 of 100 blocks", op_id=ID), []),
    "result": (Result(op_id=ID), [pack_body({"state": "ready"})]),
    "result-tokenize": (Result(op_id=ID), [pack_body({"count": 1}), bytes.fromhex("01000000")]),
    "result-detokenize": (Result(op_id=ID), [pack_body({"count": 2}), pack_body([b"Gr", b"\xc3"])]),
    "pong": (Pong(nonce=7, instance=ID, state="draining"), []),
}


def golden(name):
    return [bytes.fromhex(line) for line in (DATA / f"{name}.hex").read_text().splitlines()]


@pytest.mark.parametrize("name", CLIENT)
def test_client_messages(name):
    message, bodies = CLIENT[name]
    assert decode_client(golden(name)) == (message, bodies)
    assert encode(message, *bodies) == golden(name)


@pytest.mark.parametrize("name", SERVER)
def test_server_messages(name):
    message, bodies = SERVER[name]
    assert decode_server(golden(name)) == (message, bodies)
    assert encode(message, *bodies) == golden(name)


def test_every_message_has_a_golden_file_and_every_file_a_message():
    assert {type(message) for message, _ in CLIENT.values()} == set(ClientMessage.__args__)
    assert {type(message) for message, _ in SERVER.values()} == set(ServerMessage.__args__)
    assert {path.stem for path in DATA.iterdir()} == set(CLIENT) | set(SERVER)


@pytest.mark.parametrize("name", CLIENT)
def test_unknown_keys_are_ignored(name):
    header, *bodies = golden(name)
    extended = msgpack.packb({**msgpack.unpackb(header), "from_the_future": [1, {"x": None}]})
    assert decode_client([extended, *bodies]) == CLIENT[name]


def test_a_foreign_encoding_of_the_same_map_is_understood():
    """Another encoder may choose wider integer forms, floats of 32 bits and another order of keys."""
    wide = b"\x83" + msgpack.packb("request_id") + b"\xc5\x00\x10" + ID + msgpack.packb("num_tokens") + b"\xcf" + (512).to_bytes(8, "big")
    wide += msgpack.packb("type") + b"\xda\x00\x06credit"
    assert decode_client([wide]) == (Credit(request_id=ID, num_tokens=512), [])


def test_the_failure_codes_are_those_of_the_daemon():
    from kvd.types import ErrorCode

    assert {code.value for code in Code} == {code.value for code in ErrorCode}
