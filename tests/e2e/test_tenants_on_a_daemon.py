"""Tenants on a real daemon: keys over tcp, users over ipc, salts; and forgetting, of which nothing is left in the state directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import zmq
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from held_port import HeldPort
from kvd_client import Client, errors

from kvd.executor.fake import FakeRunner
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow
from kvd.types import BlockId, SamplingParams, pack_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

SECRET = "The recipe of the house: two parts of gin, one of courage, and the rest is nobody's business. " * 3
RULES = "Every visitor signs the ledger before the tour begins, be it morning or noon. " * 4


def ask(client: Client, prompt: str, **options) -> int:
    """Ask, compare with the oracle; the cached tokens."""
    answer = client.generate(prompt, max_tokens=4, temperature=0.0, ignore_eos=True, **options)
    assert list(answer.token_ids) == expected_tokens(prompt.encode(), 4)
    return answer.usage.cached_tokens


def blocks_of(text: str) -> int:
    return (len(text.encode()) - 1) // 16 * 16


def traces(text: str) -> dict[str, bytes]:
    """Text, token bytes and KV bytes of a prompt, as the fake executor computes them."""
    token_ids = list(text.encode())
    num_blocks = len(token_ids) // 16 + 1
    runner = FakeRunner(num_blocks, 16, max_rows=1)
    started = StartedRow(
        row=0,
        token_ids=pack_tokens(token_ids),
        num_prompt_tokens=len(token_ids),
        num_computed=0,
        num_tokens=len(token_ids),
        block_ids=tuple(BlockId(index) for index in range(num_blocks)),
        sampling=SamplingParams(temperature=0.0),
        choice=0,
    )
    runner.execute(SchedulerOutput(0, (started,), ContinuedRows()))
    found = {"text": text.encode()[:64]}
    for index in range(num_blocks - 1):
        found[f"tokens {index}"] = pack_tokens(token_ids[16 * index : 16 * index + 16])
        found[f"row {index}"] = bytes(runner._block(index))[:128]
    return found


def found_in(state_dir: Path, wanted: dict[str, bytes]) -> set[str]:
    files = [path.read_bytes() for path in state_dir.rglob("*") if path.is_file()]
    return {name for name, needle in wanted.items() if any(needle in data for data in files)}


class CurveDaemon:
    """Keys of two tenants and of one client without any, and a daemon that takes them over tcp."""

    def __init__(self, root: Path, port: int) -> None:
        self.root = root
        self.url = f"tcp://127.0.0.1:{port}"
        public, secret = zmq.curve_keypair()
        self.server_key = public.decode()
        (root / "key").write_bytes(secret)
        (root / "key").chmod(0o600)
        lines = []
        for name in ("acme", "rival", ""):
            client_public, client_secret = zmq.curve_keypair()
            lines.append(f"{client_public.decode()} {name}\n")
            (root / f"client-{name}").write_text(
                f'metadata\ncurve\n    public-key = "{client_public.decode()}"\n    secret-key = "{client_secret.decode()}"\n'
            )
        (root / "clients").write_text("".join(lines))

    def start(self) -> DaemonProcess:
        flags = ("--listen", self.url, "--curve-key-file", str(self.root / "key"), "--curve-clients-file", str(self.root / "clients"))
        return DaemonProcess(self.root, *flags)

    def client(self, name: str) -> Client:
        return Client(self.url, timeout_s=60, server_key=self.server_key, client_key_file=self.root / f"client-{name}")


def test_two_tenants_over_tcp(tmp_path: Path) -> None:
    with HeldPort() as port:
        curve = CurveDaemon(tmp_path, port.number)
        with curve.start() as process:
            process.wait_ready()
            with curve.client("acme") as acme, curve.client("rival") as rival, curve.client("") as nobody:
                acme.pin("house", SECRET)
                assert ask(acme, SECRET) == blocks_of(SECRET)
                assert ask(rival, SECRET) == 0
                assert ask(nobody, SECRET) == 0
                assert ask(acme, SECRET, cache_salt="night") == 0
                rival.pin("house", RULES)
                assert [(pin["name"], pin["tokens"]) for pin in acme.prefixes()["pins"]] == [("house", len(SECRET) // 16 * 16)]
                assert [(pin["name"], pin["tokens"]) for pin in rival.prefixes()["pins"]] == [("house", len(RULES) // 16 * 16)]
                assert nobody.prefixes()["pins"] == []
                with pytest.raises(errors.NotFound):
                    nobody.unpin("house")
                with pytest.raises(errors.BadRequest):
                    rival.forget(tenant="acme", everything=True)
                rival.forget(everything=True)
                assert acme.prefixes()["pins"] != []
                assert rival.prefixes() == {"pins": [], "hottest": []}
                nobody.checkpoint()
                for report in (rival.status(), rival.stats(), rival.prefixes()):
                    assert not any(word in json.dumps(report) for word in ("acme", "house", SECRET[:30]))
            process.kill()
        with curve.start() as process:
            process.wait_ready()
            with curve.client("acme") as acme, curve.client("rival") as rival:
                answer = acme.generate(SECRET, max_tokens=1)
                assert answer.usage.restored_tokens == blocks_of(SECRET)
                assert ask(rival, SECRET) == 0


_AS_NOBODY = """
import json, os, sys
from kvd_client import Client
with Client(sys.argv[1], timeout_s=60) as first:  # loads every module while it may be read
    first.status()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
client = Client(sys.argv[1], timeout_s=60)
usage = client.generate(sys.argv[2], max_tokens=1).usage
print(json.dumps({"cached": usage.cached_tokens, "pins": [pin["name"] for pin in client.prefixes()["pins"]]}))
try:
    client.forget(tenant="uid:0", everything=True)
except Exception as error:
    print(type(error).__name__, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_two_users_over_ipc() -> None:
    with tempfile.TemporaryDirectory(prefix="kvd-e2e-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        with DaemonProcess(root, "--ipc-tenants", "uid") as process:
            process.wait_ready()
            (root / "s.sock").chmod(0o666)
            with process.client() as client:
                client.pin("house", SECRET)
                assert ask(client, SECRET) == blocks_of(SECRET)
                command = [sys.executable, "-c", _AS_NOBODY, process.endpoint, SECRET]
                done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd="/")
                usage, refusal = done.stdout.splitlines()
                assert json.loads(usage) == {"cached": 0, "pins": []}
                assert refusal == "BadRequest"
                client.forget(tenant="uid:65534", everything=True)
                assert ask(client, SECRET) == blocks_of(SECRET)


def test_forgotten_is_forgotten_after_sigkill(tmp_path: Path) -> None:
    secret, rules = traces(SECRET), traces(RULES)
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("house", SECRET, cache_salt="acme")
            client.pin("rules", RULES)
            for _ in range(2):
                ask(client, SECRET, cache_salt="acme")
                ask(client, SECRET + RULES, cache_salt="acme")
            client.checkpoint()
            assert found_in(process.state_dir, secret) == secret.keys()
            kvd = [sys.executable, "-m", "kvd", "forget", "--cache-salt", "acme", "--json", "--connect", process.endpoint]
            done = subprocess.run(kvd, capture_output=True, text=True, check=True, timeout=120)
            process.kill()
        report = json.loads(done.stdout)
        assert report["pins"] == 1
        assert report["blocks"] >= len(SECRET) // 16
        assert found_in(process.state_dir, secret) == set()
        assert found_in(process.state_dir, rules) == rules.keys()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            assert [pin["name"] for pin in client.prefixes()["pins"]] == ["rules"]
            answer = client.generate(RULES + "?", max_tokens=1)
            assert answer.usage.restored_tokens == blocks_of(RULES + "?")
            assert ask(client, SECRET, cache_salt="acme") == 0


def test_requests_go_on_while_a_prefix_is_forgotten(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, "--fake-step-ms", "2", env={"KVD_FAILPOINTS": "forget.before_rewrite=sleep:1"}) as process:
        process.wait_ready()
        with process.client() as client:
            for _ in range(2):
                ask(client, SECRET)
                ask(client, RULES)
            stream = client.generate(SECRET + "!", max_tokens=400, temperature=0.0, ignore_eos=True, stream=True, window_tokens=300)
            tokens = list(next(stream).token_ids)  # at most 300: the others are computed when these are read
            started_s = time.monotonic()
            result = client.forget(SECRET)
            assert time.monotonic() - started_s >= 1.0
            assert result.num_blocks >= len(SECRET) // 16 - 1
            assert len(tokens) <= 300, "it ran while the prefix was forgotten"
            tokens += [token for chunk in stream for token in chunk.token_ids]
            assert tokens == list(stream.completion.token_ids) == expected_tokens((SECRET + "!").encode(), 400)
            client.checkpoint()
            assert found_in(process.state_dir, {"row": traces(SECRET)["row 2"]}) == set(), "what still ran has left nothing"
            assert ask(client, RULES) == blocks_of(RULES)
            with pytest.raises(errors.PinTooShort):
                client.forget("too short")
