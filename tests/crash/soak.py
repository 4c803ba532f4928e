"""Hours of a daemon's worst days: random work of several clients, random configuration, random deaths, and an oracle that knows what must come out.

    make soak SOAK="--kills 500 --seed 7"

The same seed gives the same plan (``soak_plan``); when a death falls within it is the machine's. After each start and at every quiet moment the daemon is
held to its promises: right tokens (``fake_oracle``), every acknowledged pin there with its content and served from cache, none that was removed, no request without
an end, no block leaked, a store that checks clean. The first breach ends the run, keeps the state directory, and prints the command that repeats the plan.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from daemon_process import DaemonDiedError, DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client, errors
from soak_plan import BLOCK, NUM_CLIENTS, PIN_TEXTS, PINS_PER_CLIENT, Life, Op, is_encrypted, plan_client, plan_life

import kvd.daemon  # noqa: F401 (declares the failpoints)
from kvd.observe import failpoints
from kvd.storage.start_guard import NO_PINS_AT
from kvd.types import SamplingParams

CALL_TIMEOUT_S = 120.0
"""Of a call that waits through several starts of a busy machine; one that takes longer hangs."""
QUIET_EVERY = 20
UNKNOWN_ENDS = (errors.ConnectionLost, errors.NotReady, errors.Draining, errors.EngineError, errors.InternalError)
"""Ends that leave open whether an operation was done."""


class BreachError(Exception):
    """A promise that was not kept."""


@lru_cache(maxsize=4096)
def expected(text: str, num_tokens: int, temperature: float, seed: int, choice: int) -> tuple[int, ...]:
    sampling = SamplingParams(temperature=temperature, seed=seed)
    return tuple(expected_tokens(text.encode(), num_tokens, sampling=sampling, choice=choice))


@dataclass(slots=True)
class PinState:
    """What a pin may be: ``possible`` are (content, salt) or None for absent. ``version`` changes with every operation on it."""

    possible: set[tuple[int, bytes] | None] = field(default_factory=lambda: {None})
    version: int = 0
    in_flight: bool = False


class Soak:
    """One state directory, its daemon and its clients."""

    def __init__(self, root: Path, *, seed: int, max_kills: int, max_s: float) -> None:
        self.root = root
        self.seed = seed
        self.max_kills = max_kills
        self.end_s = time.monotonic() + max_s
        self.counts: Counter[str] = Counter()
        self.pins = {f"pin-{client}-{slot}": PinState() for client in range(NUM_CLIENTS) for slot in range(PINS_PER_CLIENT)}
        self.lock = threading.Lock()
        self.breach: BaseException | None = None
        self.stopping = threading.Event()
        self.running = threading.Event()
        self.workers: list[Worker] = []
        self.key_flags: tuple[str, ...] = ()
        if is_encrypted(seed):
            key_file = root / "store.key"
            key_file.touch(0o600)
            key_file.write_bytes(seed.to_bytes(32, "little"))
            self.key_flags = ("--store-encryption-key-file", str(key_file))
        self.process: DaemonProcess | None = None

    def count(self, name: str, num: int = 1) -> None:
        with self.lock:
            self.counts[name] += num

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.breach = self.breach or error
        self.stopping.set()
        self.running.set()

    # -------------------------------------------------------------------------------- the daemon's lives

    def run(self) -> None:
        began_s = time.monotonic()
        self.workers = [Worker(self, index) for index in range(NUM_CLIENTS)]
        try:
            self.running.set()
            for worker in self.workers:
                worker.start()
            names = sorted(failpoints.NAMES)
            number = 0
            while self.breach is None and self.counts["kills"] < self.max_kills and time.monotonic() < self.end_s:
                self._live(plan_life(self.seed, number, names))
                number += 1
                if number % QUIET_EVERY == 0:
                    self._quiet_life()
            if self.breach is None:
                self._quiet_life()
        except BaseException as error:
            self.fail(error)
        finally:
            self.stopping.set()
            self.running.set()
            for worker in self.workers:
                worker.end()
            self.counts["seconds"] = round(time.monotonic() - began_s)
        if self.breach is not None:
            raise self.breach

    def _start(self, life: Life) -> DaemonProcess:
        self.count("starts")
        self.process = DaemonProcess(
            self.root, *life.flags, *self.key_flags, env={"KVD_FAILPOINTS": life.failpoints} if life.failpoints else {}
        )
        return self.process

    def _live(self, life: Life) -> None:
        self.count(f"lives_{life.end}")
        with self._start(life) as process:
            if life.end == "start":
                time.sleep(life.then_s)
                self._kill(process)
                return
            if not self._await_ready(process, life):
                return
            time.sleep(life.after_s)
            if self.breach is not None:
                return
            match life.end:
                case "failpoint":
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait_dead(1.0)
                    self._kill(process)
                case "terminate" | "drain":
                    if life.end == "drain":
                        with Client(process.endpoint, timeout_s=CALL_TIMEOUT_S) as client:
                            client.drain()
                    code = process.terminate(60) if life.end == "terminate" else process.wait_dead(60)
                    if code != 0:
                        raise BreachError(f"life {life.number}: a daemon that was asked to end ended with {code}; {process.log_path}")
                case "impatient":
                    process.process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait_dead(life.then_s / 4)
                    self._kill(process)
                case _:
                    self._kill(process)
        if life.end == "double":
            with self._start(life) as process:
                time.sleep(life.then_s)
                self._kill(process)

    def _kill(self, process: DaemonProcess) -> None:
        process.kill()
        if process.process.returncode == -9:
            self.count("kills")

    def _await_ready(self, process: DaemonProcess, life: Life) -> bool:
        try:
            process.wait_ready(CALL_TIMEOUT_S)
            self._check_pins(process)
        except (DaemonDiedError, *UNKNOWN_ENDS) as error:
            code = process.wait_dead(60)
            if code == -9 and life.end == "failpoint":
                self.count("kills")
            elif not (life.end == "fault" and code in {70, 74}):
                raise BreachError(f"life {life.number} ended by itself with {code}: {error}; {process.log_path}") from error
            return False
        return True

    def _quiet_life(self) -> None:
        """A start without haste: the clients pause, and everything is looked at."""
        life = replace(plan_life(self.seed, -1, ("none",)), end="terminate", failpoints="")
        with self._start(life) as process:
            if not self._await_ready(process, life):
                raise BreachError("a start without a fault died")
            self.running.clear()
            for worker in self.workers:
                if not worker.idle.wait(CALL_TIMEOUT_S):
                    raise BreachError(f"client {worker.index} has no answer after {CALL_TIMEOUT_S:.0f} s: {worker.doing}")
            if self.breach is not None:
                return
            with Client(process.endpoint, timeout_s=CALL_TIMEOUT_S) as client:
                self._check_pins(process)
                for name, state in self.pins.items():
                    for content in state.possible:
                        if content is not None and len(state.possible) == 1:
                            self.ask_pinned(client, name, content, " after all?")
                blocks = client.status()["blocks"]
                if blocks["used"] or blocks["free"] + blocks["cached"] != blocks["total"]:
                    raise BreachError(f"blocks leaked: {blocks}")
            if (code := process.terminate()) != 0:
                raise BreachError(f"a daemon that was asked to end ended with {code}; {process.log_path}")
        command = [sys.executable, "-m", "kvd", "store", "check", "--json", "--state-dir", str(self.root / "state"), *self.key_flags]
        check = subprocess.run(command, capture_output=True, text=True, check=False)
        self.count("store_checks")
        if check.returncode != 0:
            raise BreachError(f"the store does not check: {check.stdout}{check.stderr}")
        self.running.set()

    # -------------------------------------------------------------------------------- the oracle's pins

    def _check_pins(self, process: DaemonProcess) -> None:
        """Every pin on which nobody works at this moment is as it must be."""
        before = {name: (state.version, state.in_flight, set(state.possible)) for name, state in self.pins.items()}
        with Client(process.endpoint, timeout_s=CALL_TIMEOUT_S, reconnect_timeout_s=1.0) as client:
            found = {pin["name"]: pin for pin in client.prefixes()["pins"]}
            status = client.status()
        for name, state in self.pins.items():
            version, in_flight, possible = before[name]
            if in_flight or state.in_flight or state.version != version:
                continue
            self.count("pins_checked")
            self.judge_pin(name, found.get(name), possible, int(status["store"].get("failed_starts", 0)))
        if strangers := set(found) - set(self.pins):
            raise BreachError(f"pins that nobody made: {strangers}")

    def judge_pin(self, name: str, entry: dict[str, Any] | None, possible: set[tuple[int, bytes] | None], failed_starts: int) -> None:
        lengths = {None if content is None else len(PIN_TEXTS[content[0]]) for content in possible}
        if (None if entry is None else entry["tokens"]) not in lengths:
            self.count("lost_pins")
            raise BreachError(f"pin {name} is {entry}, must be one of {possible}")
        if entry is not None and entry["state"] != "held":
            self.count("pins_not_held")
            if failed_starts < NO_PINS_AT:
                raise BreachError(f"pin {name} is not held: {entry}")

    def ask_pinned(self, client: Client, name: str, content: tuple[int, bytes], suffix: str) -> None:
        text = PIN_TEXTS[content[0]]
        instance = client.ping().instance
        held = {pin["name"]: pin["state"] for pin in client.prefixes()["pins"]}.get(name) == "held"
        answer = client.generate(text + suffix, max_tokens=4, temperature=0.0, ignore_eos=True, cache_salt=content[1])
        self.check_answer(list(answer.token_ids), Op("ask", text=text + suffix, max_tokens=4), 0, answer.finish_reason, answer.usage)
        if held and answer.usage.cached_tokens < len(text) // BLOCK * BLOCK and client.ping().instance == instance:
            self.count("lost_pins")
            raise BreachError(f"pin {name} was not served from cache: {answer.usage}")

    # -------------------------------------------------------------------------------- the oracle's tokens

    def check_answer(self, token_ids: list[int], op: Op, choice: int, finish_reason: str | None, usage: Any = None) -> None:
        """A whole answer equals the oracle's, a part of one is its beginning."""
        right = list(expected(op.text, op.max_tokens, op.temperature, op.seed, choice))
        if finish_reason == "length" and len(token_ids) != len(right):
            raise BreachError(f"{len(token_ids)} tokens instead of {len(right)} for {op}")
        if token_ids != right[: len(token_ids)]:
            self.count("wrong_tokens", sum(a != b for a, b in zip(token_ids, right, strict=False)))
            raise BreachError(f"wrong tokens {token_ids} instead of {right}, choice {choice} of {op}; {usage}")
        self.count("tokens_checked", len(token_ids))
        if usage is not None and choice == 0:
            self.count("cached_tokens", usage.cached_tokens)
            self.count("restored_tokens", usage.restored_tokens)


class Worker(threading.Thread):
    """One client. Every second one waits through restarts; the others are told at once, and wait by themselves."""

    def __init__(self, soak: Soak, index: int) -> None:
        super().__init__(name=f"client-{index}", daemon=True)
        self.soak = soak
        self.index = index
        self.idle = threading.Event()
        self.doing: Op | None = None
        is_patient = index % 2 == 0
        self.client = Client(
            f"ipc://{soak.root}/s.sock",
            timeout_s=CALL_TIMEOUT_S,
            connect_timeout_s=CALL_TIMEOUT_S,
            reconnect_timeout_s=CALL_TIMEOUT_S if is_patient else 0.5,
            wait_until_ready=is_patient,
        )

    def end(self) -> None:
        self.client.close()
        if self.ident is not None:
            self.join(CALL_TIMEOUT_S)

    def run(self) -> None:
        try:
            for op in plan_client(self.soak.seed, self.index):
                if not self.soak.running.is_set():
                    self.idle.set()
                    self.soak.running.wait()
                    self.idle.clear()
                if self.soak.stopping.is_set():
                    break
                self.doing = op
                self._do(op)
                time.sleep(op.pause_s)
        except errors.ClientClosed:
            if not self.soak.stopping.is_set():
                raise
        except BaseException as error:
            self.soak.fail(error)
        finally:
            self.idle.set()

    def _do(self, op: Op) -> None:
        try:
            getattr(self, f"_{op.kind}")(op)
        except errors.Timeout as error:
            raise BreachError(f"client {self.index}: no end within {CALL_TIMEOUT_S:.0f} s: {op}") from error
        except UNKNOWN_ENDS as error:
            self.soak.count(f"ended_{error.code}")
            self._await_ready()
        else:
            self.soak.count("requests")

    def _await_ready(self) -> None:
        while not self.soak.stopping.is_set() and self.soak.running.is_set():
            with contextlib.suppress(errors.Timeout):
                self.client.wait_ready(timeout_s=1.0)
                return

    # -------------------------------------------------------------------------------- operations

    def _ask(self, op: Op) -> None:
        options: dict[str, Any] = {
            "max_tokens": op.max_tokens,
            "temperature": op.temperature,
            "seed": op.seed,
            "n": op.n,
            "cache_salt": op.salt,
            "ignore_eos": True,
        }
        if not op.stream:
            answer = self.client.generate(op.text, **options)
            for choice in answer.choices:
                self.soak.check_answer(list(choice.token_ids), op, choice.index, choice.finish_reason, answer.usage)
            return
        seen: dict[int, list[int]] = {choice: [] for choice in range(op.n)}
        ends: dict[int, str | None] = dict.fromkeys(seen)
        try:
            with self.client.generate(op.text, stream=True, **options) as stream:
                for chunk in stream:
                    if chunk.first_index != len(seen[chunk.choice]):
                        raise BreachError(f"a chunk at {chunk.first_index} after {len(seen[chunk.choice])} tokens: {op}")
                    seen[chunk.choice] += chunk.token_ids
                    ends[chunk.choice] = chunk.finish_reason or ends[chunk.choice]
                    if op.read_tokens and len(seen[0]) >= op.read_tokens:
                        break
        finally:
            for choice, token_ids in seen.items():
                self.soak.check_answer(token_ids, op, choice, ends[choice])

    def _pin(self, op: Op) -> None:
        state = self._begin(op, (op.content, op.salt))
        try:
            self.client.pin(self._pin_name(op), PIN_TEXTS[op.content], priority=op.priority, cache_salt=op.salt)
        except errors.StorageError:
            state.possible.discard((op.content, op.salt))
            state.possible |= self._before
            self.soak.count("refused_pins")
        else:
            state.possible = {(op.content, op.salt)}
            self.soak.count("pins")
        finally:
            state.in_flight = False

    def _unpin(self, op: Op) -> None:
        state = self._begin(op, None)
        try:
            self.client.unpin(self._pin_name(op))
        except errors.NotFound:
            if None not in self._before and state.version == self._version and not self._was_resent():
                self.soak.count("lost_pins")
                raise BreachError(f"{self._pin_name(op)} is unknown and was acknowledged: {self._before}") from None
            state.possible = {None}
        except errors.StorageError:
            state.possible = set(self._before)
            self.soak.count("refused_pins")
        else:
            state.possible = {None}
            self.soak.count("unpins")
        finally:
            state.in_flight = False

    def _begin(self, op: Op, content: tuple[int, bytes] | None) -> PinState:
        state = self.soak.pins[self._pin_name(op)]
        self._before = set(state.possible)
        state.in_flight = True
        state.version += 1
        self._version = state.version
        self._instance = self.soak.process.started_s if self.soak.process else 0.0
        state.possible = state.possible | {content}
        return state

    def _was_resent(self) -> bool:
        """Whether another daemon may have done what this one is asked again."""
        return self.soak.process is not None and self.soak.process.started_s != self._instance

    def _ask_pin(self, op: Op) -> None:
        state = self.soak.pins[self._pin_name(op)]
        if len(state.possible) == 1 and None not in state.possible:
            (content,) = state.possible
            assert content is not None
            self.soak.ask_pinned(self.client, self._pin_name(op), content, op.text)

    def _checkpoint(self, _op: Op) -> None:
        try:
            self.client.checkpoint()
        except errors.StorageError:
            self.soak.count("refused_checkpoints")

    def _forget(self, op: Op) -> None:
        """A text of this client alone: nothing of it is there afterwards, and everything else stays."""
        text = f"{op.text} is what somebody said in confidence, and will not say again. " * 3  # its first block is nobody else's either
        asked = Op("ask", text=text, max_tokens=4)
        for is_forgotten in (False, True):
            answer = self.client.generate(text, max_tokens=4, temperature=0.0, ignore_eos=True, cache_salt=op.salt)
            self.soak.check_answer(list(answer.token_ids), asked, 0, answer.finish_reason, answer.usage)
            if answer.usage.cached_tokens >= BLOCK and is_forgotten:  # fewer are the beginning of another text's block
                raise BreachError(f"{answer.usage.cached_tokens} tokens of what was forgotten were there: {op}")
            if not is_forgotten:
                try:
                    self.client.forget(text, cache_salt=op.salt)
                except errors.StorageError:
                    self.soak.count("refused_forgets")
                    return
                self.soak.count("forgets")

    def _report(self, _op: Op) -> None:
        self.client.stats()
        self.client.status()

    def _pin_name(self, op: Op) -> str:
        return f"pin-{self.index}-{op.slot}"


def soak(root: Path, *, seed: int, kills: int, seconds: float) -> dict[str, int]:
    """Run one soak; its counts.

    Raises:
        BreachError: a promise was not kept. Whatever else is raised is a fault as well.
    """
    run = Soak(root, seed=seed, max_kills=kills, max_s=seconds)
    run.run()
    counts = {"wrong_tokens": 0, "lost_pins": 0, **run.counts}
    return dict(sorted(counts.items()))


def _job(seed: int, kills: int, seconds: float) -> tuple[dict[str, int], str]:
    root = Path(tempfile.mkdtemp(prefix=f"kvd-soak-{seed}-"))
    try:
        counts = soak(root, seed=seed, kills=kills, seconds=seconds)
    except BaseException as error:
        return (
            {},
            f"seed {seed}: {type(error).__name__}: {error}\nstate and logs: {root}\nagain: make soak SOAK='--seed {seed} --kills {kills}'",
        )
    shutil.rmtree(root)
    return counts, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="SIGKILLs in all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time at the most")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the plan; job N has SEED + N")
    parser.add_argument("--jobs", type=int, default=1, help="daemons at once, each with a plan and a state directory of its own")
    options = parser.parse_args()
    kills = -(-options.kills // options.jobs)
    print(f"seed {options.seed}, {options.jobs} jobs of {kills} kills", flush=True)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_job, options.seed + number, kills, options.seconds) for number in range(options.jobs)]
        total: Counter[str] = Counter()
        breaches = []
        for job in jobs:
            counts, breach = job.result()
            total.update(counts)
            breaches += [breach] if breach else []
    print(json.dumps({"seed": options.seed, **dict(sorted(total.items()))}, indent=1))
    for breach in breaches:
        print(breach, file=sys.stderr)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
