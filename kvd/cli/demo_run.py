"""The demonstration's run: real daemons as child processes, real questions, SIGKILL, and the facts that must hold afterwards."""

from __future__ import annotations

import math
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd_client import Client, Completion

PREFIX_TOKENS = 1500
ANSWER_TOKENS = 64
REPEATS = 5
_TOP = 5
_TIE_NATS = 0.25
"""Two steps of a bfloat16 logit between 16 and 32."""
_TIMEOUT_S = 180.0
_CHECKPOINT_WAIT_S = 30.0

_SUBJECTS = ("A visitor", "The front desk", "A member", "The archive", "A volunteer", "The workshop", "A courier", "The reading room")
_DUTIES = (
    "signs the ledger",
    "returns borrowed tools",
    "may bring one guest",
    "keeps the lamps low",
    "asks before taking pictures",
    "locks the cabinet",
)
_TIMES = (
    "on weekdays",
    "after the evening bell",
    "while the hall is closed",
    "during the summer weeks",
    "in the first quarter of the year",
)
_QUESTIONS = (
    "May a visitor bring a guest in the evening? Answer in a few sentences.",
    "Explain to a new volunteer what to do with borrowed tools.",
    "When are the lamps kept low? Answer in a few sentences.",
    "Write a short notice about the ledger for the front desk.",
    "What should a courier know before entering the workshop?",
    "Summarise the rules of the reading room for a child.",
    "Who locks the cabinet, and when?",
    "Write a polite reply to a member who took pictures.",
    "What does the archive do during the summer weeks?",
    "List three things that a member must never forget.",
    "How does the front desk greet a visitor after the evening bell?",
    "Explain the rule about guests to a member who is in a hurry.",
)


class DemoError(Exception):
    """The demonstration could not go on, or one of its facts does not hold."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question's outcome. ``ttft_ms`` is the client's view: from the call to the first token."""

    ttft_ms: float
    completion: Completion


@dataclass(slots=True)
class Row:
    """One line of the result table."""

    name: str
    ttft_ms: list[float]
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    recomputed_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ttft_ms_median": round(statistics.median(self.ttft_ms), 1),
            "ttft_ms": [round(value, 1) for value in self.ttft_ms],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "restored_tokens": self.restored_tokens,
            "recomputed_tokens": self.recomputed_tokens,
        }


@dataclass(slots=True)
class Result:
    """What the run found. ``facts`` maps each thing that must hold to (holds, the figures it was judged by)."""

    rows: list[Row] = field(default_factory=list)
    ready_s: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, tuple[bool, str]] = field(default_factory=dict)
    prefix_tokens: int = 0
    restored_bytes: int = 0

    @property
    def holds(self) -> bool:
        return all(holds for holds, _ in self.facts.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "prefix_tokens": self.prefix_tokens,
            "restored_bytes": self.restored_bytes,
            "rows": [row.as_dict() for row in self.rows],
            "ready_s": {name: [round(value, 2) for value in values] for name, values in self.ready_s.items()},
            "facts": {name: {"holds": holds, "figures": figures} for name, (holds, figures) in self.facts.items()},
        }


class Daemon:
    """A ``kvd serve`` child on ``state_dir``. Its log goes to a file, and each line of it to ``on_line``."""

    def __init__(self, state_dir: Path, log: Path, arguments: Sequence[str], on_line: Callable[[str], None] | None) -> None:
        self.endpoint = f"ipc://{log.parent}/demo.sock"
        self._log = log
        command = [sys.executable, "-m", "kvd", "serve", "--state-dir", str(state_dir), "--listen", self.endpoint, "--log-format", "json"]
        self._started_s = time.monotonic()
        self._process = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, args=(on_line,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, client: Client) -> float:
        """Seconds from exec to READY, as the client sees it."""
        waiter = ThreadPoolExecutor(1)
        ready = waiter.submit(client.wait_ready, timeout_s=_TIMEOUT_S)
        try:
            while not ready.done():
                if self._process.poll() is not None:
                    raise DemoError(f"the daemon ended with exit code {self._process.returncode} before it was ready; its log: {self._log}")
                time.sleep(0.005)
            ready.result()
        finally:
            waiter.shutdown(wait=False, cancel_futures=True)
        return time.monotonic() - self._started_s

    def kill(self) -> None:
        """SIGKILL and wait; nothing is flushed, nothing said good-bye."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read(self, on_line: Callable[[str], None] | None) -> None:
        assert self._process.stderr is not None
        with self._log.open("a", encoding="utf-8") as log:
            for line in self._process.stderr:
                log.write(line)
                if on_line is not None:
                    on_line(line)


def system_prompt(seed: int, num_rules: int) -> str:
    """House rules made by a seeded choice of words: the same text for the same arguments on every machine."""
    choose = random.Random(seed)  # noqa: S311  words, not secrets
    rules = (f"{choose.choice(_SUBJECTS)} {choose.choice(_DUTIES)} {choose.choice(_TIMES)}." for _ in range(num_rules))
    return f"You are the assistant of house {seed}. Its rules:\n" + "\n".join(f"{number}. {rule}" for number, rule in enumerate(rules, 1))


class Demo:
    """Runs the whole; ``say`` gets a line about each stage."""

    def __init__(self, root: Path, arguments: Sequence[str], say: Callable[[str], None], on_line: Callable[[str], None] | None) -> None:
        self._root = root
        self._arguments = arguments
        self._say = say
        self._on_line = on_line
        self._result = Result()
        self._prompts: list[str] = []

    def run(self) -> Result:
        """All stages in order.

        Raises:
            DemoError: a daemon did not come up, or a checkpoint did not happen.
        """
        state = self._root / "state"
        hit = self._first_life(state)
        restored = self._restarts(state, hit)
        cold_ms = statistics.median(self._row("cold").ttft_ms)
        restored_ms = statistics.median(self._row("restored").ttft_ms)
        self._fact("restored TTFT is under half of cold", restored_ms < cold_ms / 2, f"{restored_ms:.0f} ms against {cold_ms:.0f} ms")
        self._controls(state, hit)
        del restored
        return self._result

    # ------------------------------------------------------------------------------------------ stages

    def _first_life(self, state: Path) -> Completion:
        """Cold, hit and four at once on an empty state directory; returns the answer to question 2."""
        self._say("starting a daemon on an empty state directory")
        with self._daemon(state, "first start") as (daemon, client):
            self._prompts = [self._sized_prompt(client, seed) for seed in range(REPEATS)]
            self._result.prefix_tokens = self._shared_tokens(client)
            self._say(f"asking question 1 on {REPEATS} new system prompts of about {PREFIX_TOKENS} tokens (cold)")
            self._add("cold", [self._ask(client, _QUESTIONS[0], prompt) for prompt in reversed(self._prompts)])
            self._say("asking questions 2 to 6 on the first of them (hit)")
            hits = [self._ask(client, question) for question in _QUESTIONS[1 : 1 + REPEATS]]
            self._add("hit", hits)
            self._say("asking four questions at once")
            self._add("4 at once", self._ask_at_once(client, _QUESTIONS[6:10]))
            self._await_checkpoint(client)
            self._say("killing the daemon (SIGKILL)")
            daemon.kill()
        return hits[0].completion

    def _restarts(self, state: Path, hit: Completion) -> list[Asked]:
        """Question 2 and others, each the first request after a restart on the same state."""
        asked = []
        for number, question in enumerate((_QUESTIONS[1], *_QUESTIONS[2 : 1 + REPEATS])):
            self._say(f"restart {number + 1} of {REPEATS} on the same state, then one question (restored)")
            with self._daemon(state, "restart") as (daemon, client):
                answer = self._ask(client, question)
                if number == 0:
                    self._judge_restored(client, hit, answer.completion)
                asked.append(answer)
                daemon.kill()
        self._add("restored", asked)
        return asked

    def _judge_restored(self, client: Client, hit: Completion, restored: Completion) -> None:
        status = client.status()
        block_bytes = int(client.stats()["executor"]["block_bytes"])
        self._fact("hit and restored answers agree in all tokens", hit.token_ids == restored.token_ids, f"{len(hit.token_ids)} tokens")
        floor = 16 * (self._result.prefix_tokens // 16) - 16
        tokens = restored.usage.restored_tokens
        self._fact("the system prompt was restored", tokens >= floor, f"{tokens} tokens, at least {floor} expected")
        self._result.restored_bytes = int(status["rehydration"]["bytes"])
        needed = int(status["rehydration"]["blocks"]) * block_bytes
        read = self._result.restored_bytes
        self._fact("the bytes were read from the store", read >= needed > 0, f"{read} bytes for {needed} bytes of blocks")

    def _controls(self, state: Path, hit: Completion) -> None:
        """The same question where nothing may be restored: on an empty state, and with one bit flipped in each block on disk."""
        flipped = self._root / "flipped"
        shutil.copytree(state, flipped)
        num_flipped = flip_a_bit_in_each_block(flipped)
        for name, directory in (("empty state", self._root / "empty"), ("one bit flipped in each block", flipped)):
            self._say(f"control: {name}")
            with self._daemon(directory, name) as (daemon, client):
                answer = self._ask(client, _QUESTIONS[1], logprobs=_TOP)
                dropped = client.status()["rehydration"]["dropped"]
                daemon.kill()
            self._add(f"control: {name}", [answer])
            tokens = answer.completion.usage.restored_tokens
            figures = f"{tokens} tokens restored" + (f", {num_flipped} blocks damaged, dropped: {dropped}" if directory == flipped else "")
            self._fact(f"{name}: nothing is restored", tokens == 0 and (directory != flipped or num_flipped > 0), figures)
            self._fact(f"{name}: same tokens", *_agreement(answer.completion, hit))

    # ------------------------------------------------------------------------------------------ within

    @contextmanager
    def _daemon(self, state: Path, name: str) -> Iterator[tuple[Daemon, Client]]:
        daemon = Daemon(state, self._root / "daemon.log", self._arguments, self._on_line)
        try:
            with Client(daemon.endpoint, timeout_s=_TIMEOUT_S) as client:
                self._result.ready_s.setdefault(name, []).append(daemon.wait_ready(client))
                yield daemon, client
        finally:
            daemon.kill()

    def _ask(self, client: Client, question: str, prompt: str | None = None, *, logprobs: int | None = None) -> Asked:
        messages = [{"role": "system", "content": prompt or self._prompts[0]}, {"role": "user", "content": question}]
        started_s = time.monotonic()
        stream = client.chat(messages, stream=True, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        ttft_s = 0.0
        for chunk in stream:
            if not ttft_s and chunk.token_ids:
                ttft_s = time.monotonic() - started_s
        return Asked(ttft_s * 1000, stream.completion)

    def _ask_at_once(self, client: Client, questions: Sequence[str]) -> list[Asked]:
        with ThreadPoolExecutor(len(questions)) as pool:
            try:
                return list(pool.map(lambda question: self._ask(client, question), questions))
            except BaseException:  # Ctrl-C
                client.close()  # which ends the other questions, and they are waited for
                raise

    def _sized_prompt(self, client: Client, seed: int) -> str:
        low, high = 1, PREFIX_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if len(client.tokenize(system_prompt(seed, middle))) <= PREFIX_TOKENS:
                low = middle
            else:
                high = middle - 1
        return system_prompt(seed, low)

    def _shared_tokens(self, client: Client) -> int:
        """Tokens that two conversations on the first system prompt have in common."""
        system = {"role": "system", "content": self._prompts[0]}
        first, second = (client.tokenize(messages=[system, {"role": "user", "content": question}]) for question in ("A", "9"))
        return next((index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))

    def _await_checkpoint(self, client: Client) -> None:
        """Wait for the daemon's own checkpoint; nobody asks it for one."""
        needed = self._result.prefix_tokens // 16
        deadline_s = time.monotonic() + _CHECKPOINT_WAIT_S
        self._say("waiting for the daemon's own checkpoint")
        while client.status()["store"]["blocks"] < needed:
            if time.monotonic() > deadline_s:
                raise DemoError(f"no checkpoint of {needed} blocks within {_CHECKPOINT_WAIT_S:.0f} s: {client.status()['store']}")
            time.sleep(0.1)

    def _add(self, name: str, asked: Sequence[Asked]) -> None:
        usage = asked[0].completion.usage
        self._result.rows.append(
            Row(
                name,
                [each.ttft_ms for each in asked],
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.restored_tokens,
                usage.recomputed_tokens,
            )
        )

    def _row(self, name: str) -> Row:
        return next(row for row in self._result.rows if row.name == name)

    def _fact(self, name: str, holds: bool, figures: str) -> None:
        self._result.facts[name] = (holds, figures)


def _agreement(computed: Completion, hit: Completion) -> tuple[bool, str]:
    """Whether an answer computed anew is that of the hit. Where torch rounds by the shape of a batch (bfloat16) they may part at a token that is about as
    likely as the other, and only there; what comes after it says nothing."""
    pairs = zip(computed.token_ids, hit.token_ids, strict=True)
    parted = next((index for index, (token_id, other) in enumerate(pairs) if token_id != other), None)
    if parted is None:
        return True, f"{len(hit.token_ids)} tokens"
    entry = computed.choices[0].logprobs[parted]
    gap = entry.logprob - dict(entry.top).get(hit.token_ids[parted], -math.inf)
    return gap <= _TIE_NATS, f"{parted} tokens, then two that are {gap:.3f} nats apart (a tie is at most {_TIE_NATS})"


def flip_a_bit_in_each_block(state_dir: Path) -> int:
    """Damage every block of a stopped store on disk, one bit in the middle of each; how many there were."""
    from kvd.storage.tools import block_extents

    num_flipped = 0
    for path, offset, length in block_extents(state_dir):
        with path.open("r+b") as file:
            file.seek(offset + length // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x10]))
        num_flipped += 1
    return num_flipped
