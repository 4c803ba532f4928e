"""The operations, one maker of the question and one reader of the answer each; shared by both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd_client.calls import Call, Deliver, OperationMessage, Reply
from kvd_client.errors import BadRequest, InternalError
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import (
    Checkpoint,
    Detokenize,
    Drain,
    Hello,
    HelloReply,
    ListAdapters,
    LoadAdapter,
    Ping,
    Pong,
    Prefixes,
    Stats,
    Status,
    UnloadAdapter,
    Unpin,
)
from kvd_client.requests import ChatMessages, Prompt, checked, forget_message, pin_message, prompt_body, tokenize_message
from kvd_client.results import AdapterInfo, CheckpointResult, ForgetResult, PingResult, PinResult, pack_tokens, unpack_tokens
from kvd_client.token_ids import checked_ids

_NO_ID = bytes(16)


@dataclass(frozen=True, slots=True)
class Operation:
    """A question to the daemon and how it is treated on the way (see :class:`kvd_client.calls.Call`)."""

    message: OperationMessage
    bodies: tuple[bytes, ...] = ()
    resend: bool = True
    until_ready: bool = False

    def call(self, deliver: Deliver) -> Call:
        """Ask it once."""
        return Call(self.message, *self.bodies, deliver=deliver, resend=self.resend, patient=self.until_ready, until_ready=self.until_ready)


def pin(
    name: str,
    prompt: Prompt | None,
    messages: ChatMessages | None,
    *,
    priority: int,
    ttl_s: float,
    cache_salt: str | bytes,
    adapter: str,
    template_args: Mapping[str, Any],
) -> Operation:
    kind, body = prompt_body(prompt, messages)
    message = pin_message(name, kind, priority=priority, ttl_s=ttl_s, cache_salt=cache_salt, adapter=adapter, template_args=template_args)
    return Operation(message, (body,))


def unpin(name: str) -> Operation:
    return Operation(checked(Unpin(op_id=_NO_ID, name=name)))


def forget(
    prompt: Prompt | None,
    messages: ChatMessages | None,
    *,
    tenant: str | None,
    cache_salt: str | bytes | None,
    everything: bool,
    template_args: Mapping[str, Any],
) -> Operation:
    if everything == (prompt is not None or messages is not None or cache_salt is not None):
        raise TypeError("give either a prefix or cache_salt or both, or everything=True")
    kind, *bodies = prompt_body(prompt, messages) if prompt is not None or messages is not None else ("",)
    return Operation(forget_message(kind, tenant=tenant, cache_salt=cache_salt, template_args=template_args), tuple(bodies))


def forget_result(reply: Reply) -> ForgetResult:
    return ForgetResult(int(reply.data.get("blocks", 0)), int(reply.data.get("pins", 0)))


def load_adapter(name: str) -> Operation:
    return Operation(checked(LoadAdapter(op_id=_NO_ID, name=name)))


def unload_adapter(name: str) -> Operation:
    """Not sent twice: the daemon that comes after may have loaded it for others."""
    return Operation(checked(UnloadAdapter(op_id=_NO_ID, name=name)), resend=False)


def list_adapters() -> Operation:
    return Operation(ListAdapters(op_id=_NO_ID))


def adapter_result(reply: Reply) -> AdapterInfo:
    return _adapter(reply.data)


def adapters_result(reply: Reply) -> tuple[AdapterInfo, ...]:
    return tuple(_adapter(each) for each in reply.data.get("adapters", ()))


def _adapter(data: Mapping[str, Any]) -> AdapterInfo:
    return AdapterInfo(
        name=str(data.get("name", "")),
        state=str(data.get("state", "")),
        digest=str(data.get("digest", "")),
        rank=int(data.get("rank", 0)),
        num_bytes=int(data.get("bytes", 0)),
        num_requests=int(data.get("requests", 0)),
        error=str(data.get("error", "")),
    )


def prefixes() -> Operation:
    return Operation(Prefixes(op_id=_NO_ID))


def status() -> Operation:
    return Operation(Status(op_id=_NO_ID))


def stats() -> Operation:
    return Operation(Stats(op_id=_NO_ID))


def checkpoint() -> Operation:
    """Not sent twice: another daemon has other blocks."""
    return Operation(Checkpoint(op_id=_NO_ID), resend=False)


def drain(drain_timeout_s: float | None) -> Operation:
    """Not sent twice: it would stop the daemon that comes after."""
    return Operation(checked(Drain(op_id=_NO_ID, timeout_s=drain_timeout_s)), resend=False)


def tokenize(prompt: str | None, messages: ChatMessages | None, template_args: Mapping[str, Any]) -> Operation:
    kind, body = prompt_body(prompt, messages)
    return Operation(tokenize_message(kind, template_args), (body,))


def detokenize(token_ids: Sequence[int]) -> Operation:
    try:
        body = pack_tokens(checked_ids(token_ids))
    except (OverflowError, TypeError, ValueError) as error:
        raise BadRequest(f"the token ids can't be sent: {error}", code=Code.BAD_REQUEST) from error
    return Operation(Detokenize(op_id=_NO_ID), (body,))


def ping() -> Operation:
    return Operation(Ping())


def hello() -> Operation:
    return Operation(Hello())


def wait_ready() -> Operation:
    return Operation(Ping(), until_ready=True)


def pin_result(name: str, reply: Reply) -> PinResult:
    return PinResult(name, reply.data)


def checkpoint_result(reply: Reply) -> CheckpointResult:
    return CheckpointResult(num_blocks=int(reply.data.get("blocks", 0)), num_bytes=int(reply.data.get("bytes", 0)))


def tokenize_result(reply: Reply) -> tuple[int, ...]:
    try:
        return tuple(unpack_tokens(reply.bodies[0]))
    except (IndexError, ValueError) as error:
        raise InternalError("the answer to tokenize has no token ids", code=Code.INTERNAL) from error


def detokenize_result(reply: Reply) -> tuple[bytes, ...]:
    try:
        pieces = codec.unpack_body(reply.bodies[0])
    except (IndexError, codec.ProtocolError) as error:
        raise InternalError("the answer to detokenize has no pieces", code=Code.INTERNAL) from error
    return tuple(pieces)


def ping_result(reply: Reply) -> PingResult:
    assert isinstance(reply.message, Pong)
    return PingResult(reply.message.instance.hex(), reply.message.state, reply.round_trip_s)


def hello_result(reply: Reply) -> HelloReply:
    assert isinstance(reply.message, HelloReply)
    return reply.message
