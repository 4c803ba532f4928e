"""Operations at the edge: pin, unpin, forget, the adapters', prefixes, tokenize, detokenize, status, stats, checkpoint, drain; each ends in one ``result`` or ``failed``.

Towards the engine an operation has an id of the edge's own making, so that two clients never share one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvd_client.protocol.codec import pack_body
from kvd_client.protocol.messages import (
    Checkpoint,
    Detokenize,
    Drain,
    Forget,
    ListAdapters,
    LoadAdapter,
    Pin,
    Prefixes,
    Result,
    Stats,
    Status,
    Tokenize,
    UnloadAdapter,
    Unpin,
)

from kvd.cache.tenants import tenant_salt
from kvd.commands import CheckpointNow, Command, ForgetPrefixes, OpDone, OpFailed, PinPrefix, Query, Recipe
from kvd.commands import Drain as DrainCommand
from kvd.commands import ListAdapters as ListAdaptersCommand
from kvd.commands import LoadAdapter as LoadAdapterCommand
from kvd.commands import UnloadAdapter as UnloadAdapterCommand
from kvd.commands import Unpin as UnpinCommand
from kvd.transport.bodies import TextJob, TextResult, check_ids
from kvd.transport.clients import Client
from kvd.transport.edge import RETRY_AFTER_S, Edge
from kvd.transport.errors import RequestError, bad_request
from kvd.transport.validation import check_adapter, check_fewest, check_forget, check_id, check_name, check_pin, why_so_few
from kvd.types import TOKEN_BYTES, ErrorCode, unpack_tokens

Operation = (
    Pin
    | Unpin
    | Forget
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | Prefixes
    | Tokenize
    | Detokenize
    | Status
    | Stats
    | Checkpoint
    | Drain
)

REPORT_TIMEOUT_S = 1.0
"""An engine that has not answered ``status`` or ``stats`` after so long is busy; the last snapshot answers for it."""

MAX_DRAIN_TIMEOUT_S = 86400.0

MAX_TOKEN_ID = (1 << 32) - 1
MAX_DETOKENIZE_IDS = 4096
"""Looked up on the poller's own thread: a fraction of a millisecond."""


@dataclass(slots=True)
class _Operation:
    client: Client
    message: Operation


class Operations:
    """Every operation of every client."""

    def __init__(self, edge: Edge, next_number: Callable[[], int]) -> None:
        self._edge = edge
        self._next_number = next_number
        self._in_engine: dict[bytes, _Operation] = {}
        self._tokenising: dict[int, _Operation] = {}
        self._reports: deque[tuple[float, bytes]] = deque()

    def begin(self, client: Client, message: Operation, bodies: list[bytes], now: float) -> None:
        """Take an operation.

        Raises:
            RequestError: it is refused.
        """
        check_id("op_id", message.op_id)
        if message.op_id in client.op_ids:
            self._edge.counters.duplicates += 1
            return
        if isinstance(message, Status | Stats):
            self._report(client, message, now)
            return
        if isinstance(message, Detokenize):
            self._detokenise(client, message, bodies)
            return
        if client.num_open >= self._edge.config.max_requests_per_client:
            limit = self._edge.config.max_requests_per_client
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"a client may have {limit} requests and operations (max_requests_per_client)",
                retry_after_s=RETRY_AFTER_S,
            )
        operation = _Operation(client, message)
        if isinstance(message, Tokenize | Pin) or (isinstance(message, Forget) and message.input):
            self._tokenise(operation, message, bodies)
        elif isinstance(message, Forget) and bodies:
            raise bad_request("a body without input: whether a prefix or everything is to be forgotten can't be told")
        else:
            self._command(operation, message)
        client.op_ids.add(message.op_id)

    def on_prompt(self, result: TextResult) -> bool:
        """A text thread is done with a job; whether the job was an operation's."""
        operation = self._tokenising.pop(result.number, None)
        if operation is None:
            return False
        operation.client.num_text_jobs -= 1
        try:
            token_ids = result.require_ids()
            if isinstance(operation.message, Pin):
                self._pin(operation, operation.message, result)
            elif isinstance(operation.message, Forget):
                # The last token of a text may be another one where the text goes on.
                self._forget(operation, operation.message, token_ids[:-TOKEN_BYTES] if result.text is not None else token_ids)
            else:
                self._answer(operation, {"count": len(token_ids) // 4}, token_ids)
        except RequestError as error:
            self._refuse(operation, error)
        except Exception as error:  # one operation's fault must not end the edge
            self._refuse(operation, self._edge.internal_error(error))
        return True

    def forget_client(self, client: Client) -> None:
        """What the client's operations end with is nobody's business any more; the engine goes on with them."""
        self._in_engine = {key: operation for key, operation in self._in_engine.items() if operation.client is not client}
        self._tokenising = {key: operation for key, operation in self._tokenising.items() if operation.client is not client}

    def on_done(self, event: OpDone) -> None:
        """The engine's answer."""
        operation = self._in_engine.pop(event.op_id, None)
        if operation is not None:
            result = event.result
            if isinstance(operation.message, Stats):
                result = self._with_transport(result)
            elif isinstance(operation.message, Pin | Unpin):
                result = {**result, "name": operation.message.name}  # the engine knows it with the tenant's
            self._answer(operation, result)

    def on_failed(self, event: OpFailed) -> None:
        """The engine's refusal."""
        operation = self._in_engine.pop(event.op_id, None)
        if operation is not None:
            self._refuse(operation, RequestError(event.code, event.message, retry_after_s=event.retry_after_s))

    def on_stopped(self, error: RequestError) -> None:
        """The engine has ended: reports come from the last snapshot, everything else failed."""
        for operation in self._in_engine.values():
            if isinstance(operation.message, Status | Stats):
                self._answer(operation, self._from_snapshot(operation.message))
            else:
                self._refuse(operation, error)
        self._in_engine.clear()

    def tick(self, now: float) -> None:
        """Answer the reports that the engine is too busy for."""
        while self._reports and self._reports[0][0] <= now:
            operation = self._in_engine.pop(self._reports.popleft()[1], None)
            if operation is not None:
                assert isinstance(operation.message, Status | Stats)
                self._answer(operation, self._from_snapshot(operation.message))

    # -------------------------------------------------------------------------------- inside

    def _report(self, client: Client, message: Status | Stats, now: float) -> None:
        operation = _Operation(client, message)
        what = "status" if isinstance(message, Status) else "stats"
        op_id = self._internal_id()
        is_running = self._edge.snapshot.state in {"ready", "draining"} and not self._edge.stopped
        if is_running and client.num_open < self._edge.config.max_requests_per_client and self._edge.put(Query(op_id, what)):
            self._in_engine[op_id] = operation
            self._reports.append((now + REPORT_TIMEOUT_S, op_id))
            client.op_ids.add(message.op_id)
        else:
            self._answer(operation, self._from_snapshot(message))

    def _from_snapshot(self, message: Status | Stats) -> dict[str, Any]:
        snapshot = self._edge.snapshot
        return snapshot.status if isinstance(message, Status) else self._with_transport(snapshot.stats)

    def _with_transport(self, stats: dict[str, Any]) -> dict[str, Any]:
        return {**stats, "transport": self._edge.counters.as_dict()}

    def _tokenise(self, operation: _Operation, message: Tokenize | Pin | Forget, bodies: list[bytes]) -> None:
        vocab_size = 0
        if isinstance(message, Pin):
            hello, _ = self._edge.require_ready()
            check_pin(message)
            vocab_size = hello.vocab_size
        elif isinstance(message, Forget):
            hello, _ = self._edge.require_ready()
            check_forget(message)
            vocab_size = hello.vocab_size
        elif self._edge.text is None:
            raise self._edge.starting()
        elif message.input not in {"text", "messages"}:
            raise bad_request(f"input is {message.input!r:.40}; it must be text or messages")
        if len(bodies) != 1:
            raise bad_request(f"{len(bodies)} body frames; there must be one")
        if isinstance(message, Pin) and message.input == "text":
            hello, text = self._edge.require_ready()
            check_fewest(text.fewest_tokens(bodies[0]), max_tokens=None, max_model_len=hello.max_model_len, model_len=hello.model_len)
        client, number = operation.client, self._next_number()
        self._edge.queue_text(
            TextJob(
                number=number,
                peer=client.peer,
                input=message.input,
                body=bodies[0],
                vocab_size=vocab_size,
                template_args=message.template_args,
                is_prefix=isinstance(message, Pin | Forget),
            )
        )
        client.num_text_jobs += 1
        self._tokenising[number] = operation

    def _detokenise(self, client: Client, message: Detokenize, bodies: list[bytes]) -> None:
        if self._edge.text is None:
            raise self._edge.starting()
        if len(bodies) != 1:
            raise bad_request(f"{len(bodies)} body frames; there must be one")
        num_ids = len(bodies[0]) // TOKEN_BYTES
        if num_ids > MAX_DETOKENIZE_IDS:
            raise bad_request(f"{num_ids} ids; at most {MAX_DETOKENIZE_IDS} are allowed")
        token_ids = unpack_tokens(check_ids(bodies[0], MAX_TOKEN_ID + 1))  # a model's vocabulary may be padded beyond the text's
        self._answer(_Operation(client, message), {"count": num_ids}, pack_body(self._edge.text.token_bytes(token_ids)))

    def _pin(self, operation: _Operation, message: Pin, result: TextResult) -> None:
        hello, text = self._edge.require_ready()
        num_tokens = len(result.token_ids) // 4
        if num_tokens < hello.block_size_tokens:
            raise RequestError(
                ErrorCode.PIN_TOO_SHORT, f"the prefix has {num_tokens} tokens; at least one block of {hello.block_size_tokens} is needed"
            )
        if num_tokens >= hello.max_model_len:
            raise RequestError(
                ErrorCode.PROMPT_TOO_LONG,
                f"the prefix has {num_tokens} tokens; it must leave room for one within {hello.max_model_len}{why_so_few(hello.model_len)}",
            )
        now_unix_s = max(0.0, time.time())
        recipe = Recipe(
            name=operation.client.caller.qualified(message.name),
            token_ids=result.token_ids,
            tokenizer_digest=text.digest,
            messages=result.messages,
            text=result.text,
            template_args=message.template_args,
            tenant_salt=tenant_salt(operation.client.caller.tenant, message.cache_salt),
            adapter_name=message.adapter,
            priority=message.priority,
            created_unix_s=now_unix_s,
            expires_unix_s=now_unix_s + message.ttl_s if message.ttl_s else 0.0,
        )
        self._send_command(operation, lambda op_id: PinPrefix(op_id, recipe))

    def _forget(self, operation: _Operation, message: Forget, token_ids: bytes = b"") -> None:
        """Without ids: everything of the tenant or salt."""
        hello, _ = self._edge.require_ready()
        caller = operation.client.caller
        tenant = caller.tenant if message.tenant is None else message.tenant
        if tenant != caller.tenant and not caller.is_operator:
            raise bad_request("tenant is another's; only an operator on this machine may name one")
        if message.input and len(token_ids) // TOKEN_BYTES < hello.block_size_tokens:
            size = hello.block_size_tokens
            raise RequestError(ErrorCode.PIN_TOO_SHORT, f"the prefix holds no full block of {size} tokens: nothing is kept under it")
        is_whole = message.cache_salt is None and not message.input
        salt = None if is_whole else tenant_salt(tenant, message.cache_salt or b"")
        self._send_command(operation, lambda op_id: ForgetPrefixes(op_id, tenant, salt, token_ids))

    def _command(
        self, operation: _Operation, message: Unpin | Forget | LoadAdapter | UnloadAdapter | ListAdapters | Prefixes | Checkpoint | Drain
    ) -> None:
        match message:
            case Unpin():
                check_name(message.name)
                self._edge.require_ready()
                name = operation.client.caller.qualified(message.name)
                self._send_command(operation, lambda op_id: UnpinCommand(op_id, name))
            case Forget():
                check_forget(message)
                self._forget(operation, message)
            case LoadAdapter() | UnloadAdapter():
                check_adapter(message.name)
                _require_no_tenant(operation.client, "to load or unload an adapter")
                self._edge.require_ready()
                make = LoadAdapterCommand if isinstance(message, LoadAdapter) else UnloadAdapterCommand
                self._send_command(operation, lambda op_id: make(op_id, message.name))
            case ListAdapters():
                self._require_engine()
                self._send_command(operation, ListAdaptersCommand)
            case Prefixes():
                self._require_engine()
                self._send_command(operation, lambda op_id: Query(op_id, "prefixes", operation.client.caller.tenant))
            case Checkpoint():
                _require_no_tenant(operation.client, "checkpoint")
                self._require_engine()
                self._send_command(operation, CheckpointNow)
            case Drain():
                _require_no_tenant(operation.client, "drain")
                timeout_s = self._edge.drain_timeout_s if message.timeout_s is None else message.timeout_s
                if not 0 <= timeout_s <= MAX_DRAIN_TIMEOUT_S:
                    raise bad_request(f"timeout_s is {timeout_s}; it must be from 0 to {MAX_DRAIN_TIMEOUT_S}")
                self._send_command(operation, lambda op_id: DrainCommand(op_id, timeout_s))

    def _require_engine(self) -> None:
        if self._edge.snapshot.state != "draining" or self._edge.stopped:
            self._edge.require_ready()

    def _send_command(self, operation: _Operation, make: Callable[[bytes], Command]) -> None:
        op_id = self._internal_id()
        self._edge.put_or_refuse(make(op_id))
        self._in_engine[op_id] = operation

    def _internal_id(self) -> bytes:
        return self._next_number().to_bytes(16, "big")

    def _answer(self, operation: _Operation, result: dict[str, Any], *bodies: bytes) -> None:
        """End an operation; raises nothing, so an operation has its answer whatever the result holds."""
        try:
            packed = pack_body(result)
        except Exception as error:  # a fault of whoever made the result
            self._refuse(operation, self._edge.internal_error(error))
            return
        operation.client.op_ids.discard(operation.message.op_id)
        self._edge.send(operation.client.peer, Result(op_id=operation.message.op_id), packed, *bodies)

    def _refuse(self, operation: _Operation, error: RequestError) -> None:
        operation.client.op_ids.discard(operation.message.op_id)
        self._edge.send_failed(operation.client.peer, error, op_id=operation.message.op_id)


def _require_no_tenant(client: Client, what: str) -> None:
    """What concerns everybody is not one tenant's to do.

    Raises:
        RequestError: the client is a tenant's, and no operator.
    """
    if client.caller.tenant and not client.caller.is_operator:
        raise bad_request(f"{what} concerns every tenant: it is for operators and for clients without a tenant")
