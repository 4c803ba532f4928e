"""The daemons of the random requests: one that crowds press on, and a roomy one beside it that is asked the same again, alone."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from answer_checks import check_completion, check_end, check_failure, need, same_answer, tally
from daemon_process import DaemonProcess
from kvd_client import Client, errors
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Failed
from kvd_client.results import Completion
from lora_directories import make_adapter
from plain_answer import prompt_tokens, truncated
from request_drawing import ADAPTERS, Ask, Op
from request_rules import Facts, ends_of, repeats
from two_tenants import TwoTenants
from typed_crowd import run_typed
from wire_crowd import BreachError, Exchange, WireCrowd

SIZES = {"model.layers.0.self_attn.q_proj": (16, 16), "model.layers.0.self_attn.v_proj": (8, 16)}
GONE = ("interrupted",)
KEPT = "What is pinned before a kill is there after it, whoever asks for what meanwhile."
_MOST_TOLD = 8
STREAMED_EVERY = 4
STREAM_S = 60.0
QUIET_S = 60.0
"""Until nothing of what is over is held any more."""


def make_adapters(directory: Path, sizes: dict[str, tuple[int, int]] = SIZES, *, size: float = 1.0) -> Path:
    for seed, name in enumerate(ADAPTERS):
        make_adapter(directory / name, sizes, seed=seed, size=size)
    return directory


class Alone:
    """The roomy daemon: each request comes alone, cold, without drafts, in other chunks."""

    def __init__(self, root: Path, adapters: Path, *arguments: str, fake: bool = True, tolerance: float = 1e-9) -> None:
        root.mkdir()
        flags = ("--no-persist", "--speculation", "off", "--max-tokens-per-step", "37", "--adapter-dir", str(adapters))
        self.process = DaemonProcess(root, *flags, *arguments, fake=fake)
        self.tolerance = tolerance
        self._num_asked = 0
        self._client: Client | None = None
        self.digests: dict[str, bytes] = {"": b""}

    def wait_ready(self) -> None:
        self.process.wait_ready()
        self._client = self.process.client()
        self.digests |= {name: bytes.fromhex(self._client.load_adapter(name).digest) for name in ADAPTERS}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def prompt_ids(self, ask: Ask, facts: Facts) -> list[int] | None:
        """The tokens that the request computes, or None where only the daemon can tell."""
        if facts.is_fake:
            return prompt_tokens(ask, facts)
        assert self._client is not None
        if isinstance(ask.prompt, str):
            token_ids = self._client.tokenize(ask.prompt)
        elif isinstance(ask.prompt[0], int):
            token_ids = ask.prompt
        elif ask.options.get("tools"):
            return None
        else:
            token_ids = self._client.tokenize(messages=list(ask.prompt))
        return truncated(ask, list(token_ids), facts)

    def ask_again(self, ask: Ask, first: Completion) -> None:
        """Raises ``BreachError`` if the answer is another one."""
        assert self._client is not None
        self._num_asked += 1
        options = _asked_again(ask, first)
        options["cache_salt"] = f"cold {self._num_asked}"
        generate: Any = self._client.chat if _is_chat(ask) else self._client.generate
        same_answer(ask, first, generate(ask.prompt, **options), self.tolerance)


def _is_chat(ask: Ask) -> bool:
    return isinstance(ask.prompt, tuple) and isinstance(ask.prompt[0], dict)


def _asked_again(ask: Ask, first: Completion) -> dict[str, Any]:
    """The same with the seed that was drawn, drafting as the daemon likes, and with all the time there is."""
    left_out = ("speculation", "num_draft", "draft_acceptance", "deadline_s", "queue_timeout_s", "priority")
    return {name: value for name, value in ask.options.items() if name not in left_out} | {"seed": first.seed}


class Pressed:
    """A daemon that crowds press on, with what is known of it."""

    def __init__(
        self, root: Path, facts: Facts, adapters: Path, *arguments: str, alone: Alone, fake: bool = True, with_tenants: bool = False
    ) -> None:
        root.mkdir(exist_ok=True)
        self._tenants = TwoTenants(root) if with_tenants else None
        if self._tenants is not None:
            arguments = (*arguments, *self._tenants.flags)
        self.facts = facts
        self.alone = alone
        self._command = (root, "--adapter-dir", str(adapters), *arguments)
        self.process = DaemonProcess(*self._command, fake=fake)
        self.counts: Counter[str] = Counter()
        self._crowd: WireCrowd | None = None

    def __enter__(self) -> Self:
        self.process.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._crowd is not None:
            self._crowd.close()
        self.process.__exit__(*error)
        if self._tenants is not None:
            self._tenants.close()

    def press(self, items: Sequence[Ask | Op], *, timeout_s: float = 60.0) -> None:
        """A crowd; every promise is looked at.

        Raises:
            BreachError: one was not kept.
        """
        if self._crowd is None:
            self._crowd = WireCrowd(self.process.endpoint, tenants=self._tenants)
        began_s = time.monotonic()
        exchanges = self._crowd.run(items, timeout_s=timeout_s)
        self.counts["pressed_ms"] += round((time.monotonic() - began_s) * 1000)
        tally(self.counts, [exchange.ask for exchange in exchanges])
        self.counts["requests"] += len(exchanges)
        self._check_all(exchanges)

    def leave(self, items: Sequence[Ask | Op]) -> None:
        """A crowd whose connections go away while it is answered: nothing is said of it any more, and nothing of it stays."""
        WireCrowd(self.process.endpoint, seed=1).leave(items, after_s=0.06)
        self.counts["requests"] += sum(isinstance(item, Ask) for item in items)

    def drain(self, items: Sequence[Ask | Op]) -> None:
        """A crowd, and SIGTERM in the middle: what was accepted ends as ever, or with ``draining`` or ``aborted``, and the daemon ends well.

        Raises:
            BreachError: a promise was not kept.
        """
        crowd = WireCrowd(self.process.endpoint, seed=2)
        try:
            child = self.process.process
            exchanges = crowd.run_to_the_end(items, child.terminate, lambda: child.poll() is not None, after_s=0.02)
        finally:
            crowd.close()
        need(child.poll() == 0, f"it ended with {child.poll()}")
        self.counts["requests"] += len(exchanges)
        self.counts["drained"] += sum(isinstance(each.terminal, Failed) and each.terminal.code == Code.DRAINING for each in exchanges)
        begun = [each for each in exchanges if each.terminal is None and each.num_messages]
        need(not begun, f"{len(begun)} begun and without an end", begun[:_MOST_TOLD])
        self._check_all([each for each in exchanges if each.terminal is not None and not _is_drained(each)])

    def _check_all(self, exchanges: Sequence[Exchange]) -> None:
        breaches = [breach for exchange in exchanges if (breach := self._breach_of(exchange))]
        if breaches:
            raise BreachError("\n".join([f"{len(breaches)} of {len(exchanges)} requests", *breaches[:_MOST_TOLD]]))

    def _breach_of(self, exchange: Exchange) -> str:
        try:
            self._check(exchange)
        except BreachError as breach:
            return str(breach)
        return ""

    def _check(self, exchange: Exchange) -> None:
        ask, terminal = exchange.ask, exchange.terminal
        self.counts[f"ended {terminal.code if isinstance(terminal, Failed) else 'finished'}"] += 1
        prompt_ids = self.alone.prompt_ids(ask, self.facts)
        digest = self.alone.digests.get(ask.options.get("adapter", ""), b"")
        completion = check_end(exchange, prompt_ids, digest, self.facts)
        if completion is None:
            return
        usage = completion.usage
        self.counts["tokens"] += usage.completion_tokens
        self.counts["drafted"] += usage.drafted_tokens
        self.counts["accepted"] += usage.accepted_tokens
        self.counts["cached"] += usage.cached_tokens
        if repeats(ask):
            self.alone.ask_again(ask, completion)
            self.counts["repeated"] += 1
            if self.counts["repeated"] % STREAMED_EVERY == 0 and self.process.process.poll() is None:
                self._stream_again(ask, completion)

    def _stream_again(self, ask: Ask, first: Completion) -> None:
        """Here, where much of it is cached, in small pieces; drafts pay for who is alone."""
        options = _asked_again(ask, first)
        if "beam_width" not in options:
            options["speculation"] = "ngram"
        with self.process.client() as client:
            generate: Any = client.chat if _is_chat(ask) else client.generate
            with generate(ask.prompt, stream=True, window_tokens=max(4, 2 * options.get("n", 1)), timeout_s=STREAM_S, **options) as stream:
                try:
                    list(stream)
                except errors.Timeout:
                    raise BreachError(f"alone, and not over within {STREAM_S:.0f} s: {ask}") from None
                same_answer(ask, first, stream.completion, self.alone.tolerance)
        self.counts["streamed again"] += 1

    def press_and_kill(self, asks: Sequence[Ask], *, after_s: float) -> None:
        """A crowd of typed clients, and a SIGKILL among them: each call ends once, with an answer or an error that its caller can act on; the next daemon has the pin.

        Raises:
            BreachError: a promise was not kept.
        """
        with self.process.client() as client:
            client.pin("kept", KEPT)
        outcomes = asyncio.run(run_typed(self, asks, after_s=after_s))
        tally(self.counts, list(asks))
        self.counts["requests"] += len(asks)
        breaches = [breach for ask, outcome in zip(asks, outcomes, strict=True) if (breach := self._breach_of_typed(ask, outcome))]
        if breaches:
            raise BreachError("\n".join([f"{len(breaches)} of {len(asks)} requests", *breaches[:_MOST_TOLD]]))
        with self.process.client() as client:
            pins = {pin["name"]: pin["state"] for pin in client.prefixes()["pins"]}
            need(pins.get("kept") == "held", f"the pin after a kill: {pins}")
            client.unpin("kept")

    def restart(self) -> None:
        """SIGKILL, and another daemon on what is left."""
        self.process.kill()
        self.process = DaemonProcess(*self._command, fake=self.facts.is_fake)
        self.counts["kills"] += 1

    def _breach_of_typed(self, ask: Ask, outcome: Completion | errors.KvdError | None) -> str:
        prompt_ids = self.alone.prompt_ids(ask, self.facts)
        digest = self.alone.digests.get(ask.options.get("adapter", ""), b"")
        self.counts[f"ended {outcome.code if isinstance(outcome, errors.KvdError) else 'closed' if outcome is None else 'finished'}"] += 1
        try:
            if isinstance(outcome, Completion):
                need(not ends_of(ask, prompt_ids, self.facts).must, "answered, must fail", ask)
                check_completion(ask, outcome, prompt_ids, digest, self.facts)
                if repeats(ask):
                    self.alone.ask_again(ask, outcome)
                    self.counts["repeated"] += 1
            elif outcome is not None and outcome.code not in GONE:
                retry_after_s = outcome.retry_after_s
                check_failure(ask, outcome.code, str(outcome.args[0]), outcome.retryable, retry_after_s, prompt_ids, self.facts)
        except BreachError as breach:
            return str(breach)
        return ""

    def check_quiet(self) -> None:
        """Nothing of what is over is held any more.

        Raises:
            BreachError: something is.
        """
        until_s = time.monotonic() + QUIET_S
        with self.process.client() as client:
            while True:
                status, stats = client.status(), client.stats()
                scheduler, adapters = stats["scheduler"], status["adapters"]
                held = {
                    **status["requests"],
                    **{name: status["blocks"][name] for name in ("used", "shared", "references")},
                    **{
                        name: scheduler.get(name, 0)
                        for name in ("running", "waiting", "stalled", "compiling", "constraints_waiting", "loading_blocks")
                    },
                    "late compiles": scheduler.get("constraints_late", 0),
                    "adapters waited for": adapters["waiting"],
                    "adapters in use": sum(each["requests"] for each in adapters["loaded"]),
                }
                if not any(held.values()):
                    break
                need(time.monotonic() < until_s, f"held after all is over: { {name: count for name, count in held.items() if count} }")
                time.sleep(0.02)
        blocks = status["blocks"]
        need(blocks["free"] + blocks["cached"] == blocks["total"], f"blocks don't add up: {blocks}")
        self.counts["preemptions"] = scheduler["preemptions"]
        self.counts["partial_hit_tokens"] = stats["cache"]["partial_hit_tokens"]


def _is_drained(exchange: Exchange) -> bool:
    """Whether its end is that of its daemon."""
    terminal = exchange.terminal
    if isinstance(terminal, Failed):
        return terminal.code == Code.DRAINING
    return terminal is not None and any(end.finish_reason == "aborted" for end in terminal.choices)
