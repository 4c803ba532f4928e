"""Hostile frames over real sockets: the server answers a valid request after each of them."""

from __future__ import annotations

import os

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvd_client.protocol.messages import Failed, Finished, Generate, Ping, Pong

pytestmark = pytest.mark.socket

frame = (
    st.binary(max_size=200)
    | st.binary(min_size=65_000, max_size=70_000)
    | st.just(b"")
    | st.just(b"\x91" * 5000)
    | st.just(b"\xdf\xff\xff\xff\xff")
    | st.just(msgpack.packb({"type": "hello", "protocol": [99, 99]}))
    | st.just(msgpack.packb({"type": "from_the_future", "request_id": bytes(16)}))
    | st.just(msgpack.packb({"type": "generate", "request_id": bytes(16), "input": "messages"}))
    | st.just(msgpack.packb({"type": "generate", "request_id": bytes(16), "input": "text"})[:-3])
)


def test_the_server_outlives_hostile_frames(start_server, connect):
    running = start_server(max_frames=4, max_message_bytes=100_000)
    good, hostile = connect(running.url), connect(running.url)
    while isinstance(good.ask(Generate(request_id=os.urandom(16), input="text", max_tokens=1), b"x")[0], Failed):
        pass
    while not isinstance(good.receive()[0], Finished):
        pass

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(frames=st.lists(frame, min_size=1, max_size=12))
    def attack(frames):
        hostile.send(list(frames))
        nonce = int.from_bytes(os.urandom(6), "big")
        hostile.send(Ping(nonce=nonce))
        while True:
            message, _ = hostile.receive()
            if isinstance(message, Pong) and message.nonce == nonce:
                break
        assert good.generate()[0] == "abcab"

    attack()
    counters = running.server._session.counters
    assert counters.malformed > 0
    assert counters.oversized > 0
    assert counters.internal_errors == 0
