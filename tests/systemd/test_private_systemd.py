"""The real units under a real systemd: start, answer, crash, hang, drain, refuse."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq.auth
from fake_oracle import expected_tokens
from kvd_client import Client
from private_systemd import PrivateSystemd, wait_for

pytestmark = [pytest.mark.systemd, pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

SYSTEM = "The night porter keeps the keys of all rooms and hands them out by name alone. " * 10
NUM_SYSTEM_TOKENS = 16 * (len(SYSTEM) // 16)
SOCKET = "run/kvd/kvd.sock"
DROP_IN = "etc/systemd/system/kvd.service.d/test.conf"
FAKE = '[model]\nexecutor = "fake"\n[storage]\ncheckpoint_interval_s = 0.2\n'


class Service:
    """``kvd.service`` of the machine, with an empty state directory and the unit as it is installed."""

    def __init__(self, machine: PrivateSystemd) -> None:
        self.machine = machine

    def reset(self) -> None:
        self.machine.systemctl("stop", "kvd")
        self.machine.systemctl("reset-failed", check=False)
        self.machine.run("rm", "-rf", "/var/lib/kvd", f"/{DROP_IN}")
        self.machine.run("journalctl", "--rotate", "--vacuum-time=1s", "-q")
        self.machine.systemctl("daemon-reload")
        self.configure(FAKE)

    def configure(self, toml: str) -> None:
        (self.machine.root / "etc/kvd/kvd.toml").write_text(toml, encoding="utf-8")

    def override(self, *lines: str) -> None:
        """Put the lines into the drop-in's [Service] section."""
        drop_in = self.machine.root / DROP_IN
        drop_in.parent.mkdir(exist_ok=True)
        drop_in.write_text("\n".join(["[Service]", *lines, ""]), encoding="utf-8")
        self.machine.systemctl("daemon-reload")

    def client(self) -> Client:
        return Client(f"ipc://{self.machine.root}/{SOCKET}", timeout_s=60)

    def show(self, *properties: str) -> dict[str, str]:
        return self.machine.show("kvd", *properties)

    def await_restart(self, number: int) -> None:
        def is_back() -> bool:
            return self.show("NRestarts", "ActiveState") == {"NRestarts": str(number), "ActiveState": "active"}

        wait_for(is_back, self.describe)

    def describe(self) -> str:
        status = self.machine.systemctl("status", "kvd", check=False).stdout
        return status + self.machine.run("journalctl", "-u", "kvd", "--no-pager").stdout

    def messages(self) -> str:
        return "\n".join(str(record.get("MESSAGE")) for record in self.machine.journal("kvd"))


@pytest.fixture
def service(machine: PrivateSystemd) -> Iterator[Service]:
    each = Service(machine)
    each.reset()
    yield each
    machine.systemctl("kill", "--signal=KILL", "kvd", check=False)


def ask(client: Client, question: str, num_tokens: int = 12) -> int:
    """Ask, compare with the oracle, and return how many prompt tokens were restored."""
    prompt = SYSTEM + question
    answer = client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == expected_tokens(prompt.encode(), num_tokens)
    return answer.usage.restored_tokens


def fill(client: Client) -> None:
    """Make the system prompt hot, and wait until it is on disk."""
    ask(client, "one")
    ask(client, "two")
    wait_for(lambda: client.status()["store"]["blocks"] * 16 >= NUM_SYSTEM_TOKENS, lambda: str(client.status()["store"]))


def test_a_started_service_answers_its_group_and_nobody_else(service: Service) -> None:
    machine = service.machine
    assert machine.run("systemd-analyze", "verify", "kvd.service").stderr == ""
    machine.systemctl("start", "kvd")
    assert service.show("ActiveState", "StatusText") == {"ActiveState": "active", "StatusText": "ready"}
    machine.run("kvd", "ping", user="kvd")
    generate = machine.run("kvd", "generate", "--prompt", "Who is there?", "--max-tokens", "8", "--temperature", "0", user="kvd")
    assert generate.stdout.rstrip("\n") == bytes(expected_tokens(b"Who is there?", 8, ignore_eos=False)).decode()
    stranger = machine.run("kvd", "ping", "--connect", f"ipc:///{SOCKET}", "--timeout", "1", user="games", check=False)
    assert stranger.returncode == 69
    for path, expected in {SOCKET: "660 kvd kvd", "run/kvd": "750 kvd kvd", "var/lib/kvd": "700 kvd kvd"}.items():
        assert machine.run("stat", "--format=%a %U %G", f"/{path}").stdout.strip() == expected
    records = machine.journal("kvd")
    assert {"daemon", "storage"} <= {record.get("KVD_ROOM") for record in records}, "records come by journald's own protocol"


def test_the_gateways_unit_answers_over_http_and_its_end_is_clean(service: Service) -> None:
    machine = service.machine
    assert machine.run("systemd-analyze", "verify", "kvd-gateway.service").stderr == ""
    (machine.root / "etc/kvd/gateway.env").write_text("KVD_API_KEY=secret\n", encoding="utf-8")
    machine.systemctl("start", "kvd-gateway")
    wait_for(lambda: machine.show("kvd", "ActiveState")["ActiveState"] == "active", service.describe)
    ask_over_http = """
import json, urllib.request
body = json.dumps({"prompt": "Who is there?", "max_tokens": 8, "temperature": 0}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, headers)
print(json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["text"], end="")
"""
    answer = machine.run("/opt/kvd/bin/python", "-c", ask_over_http)
    assert answer.stdout == bytes(expected_tokens(b"Who is there?", 8, ignore_eos=False)).decode()
    machine.systemctl("stop", "kvd-gateway")
    assert machine.show("kvd-gateway", "Result", "NRestarts") == {"Result": "success", "NRestarts": "0"}


def test_a_killed_service_comes_back_warm(service: Service) -> None:
    service.machine.systemctl("start", "kvd")
    with service.client() as client:
        fill(client)
        service.machine.systemctl("kill", "--signal=KILL", "kvd")
        service.await_restart(1)
        assert ask(client, "after the crash") >= NUM_SYSTEM_TOKENS


def test_a_hang_is_caught_by_the_watchdog_and_ends_warm(service: Service) -> None:
    service.machine.systemctl("start", "kvd")
    with service.client() as client:
        fill(client)
    service.machine.systemctl("stop", "kvd")
    service.override("WatchdogSec=2s", "RestartSec=1h", "Environment=KVD_FAKE_STEP_MS=600000")
    service.machine.systemctl("start", "kvd")
    with service.client() as client:
        hangs = client.generate(SYSTEM + "never answered", stream=True, max_tokens=1)
        wait_for(lambda: service.show("SubState") == {"SubState": "auto-restart"}, service.describe)
        hangs.close()  # else the client asks the next one too
    service.override()  # the restart is due by the unit's own time now, and what comes has the unit's own watchdog
    service.await_restart(1)
    with service.client() as client:
        assert client.status()["rehydration"]["tokens"] >= NUM_SYSTEM_TOKENS
    messages = service.messages()
    assert "Watchdog timeout" in messages
    assert "Fatal Python error: Aborted" in messages
    assert "in _collect" in messages, "the threads' stacks say where it hung"
    assert not list((service.machine.root / "var/lib/kvd").glob("core*"))
    with service.client() as client:
        assert ask(client, "after the hang") >= NUM_SYSTEM_TOKENS


def test_ready_waits_for_rehydration_and_progress_extends_the_start(service: Service) -> None:
    service.machine.systemctl("start", "kvd")
    with service.client() as client:
        fill(client)
    service.machine.systemctl("stop", "kvd")
    slow = "Environment=KVD_CHECKPOINT_BYTES_PER_STEP=1 KVD_FAILPOINTS=rehydrate.before_copy_in=sleep:0.1"  # block by block
    service.override("TimeoutStartSec=4s", slow)
    service.machine.systemctl("start", "--no-block", "kvd")
    seen: list[str] = []

    def is_started() -> bool:
        now = service.show("ActiveState", "StatusText")
        seen.append(now["StatusText"])
        assert now["ActiveState"] in {"activating", "active"}, service.describe()
        return now["ActiveState"] == "active"

    wait_for(is_started, service.describe)
    assert any(text.startswith("rehydrating: ") for text in seen), seen
    with service.client() as client:
        status = client.status()
        assert status["startup_s"]["total"] > 4, "else the timeout was never in the way"
        assert status["rehydration"]["tokens"] >= NUM_SYSTEM_TOKENS
    assert service.show("NRestarts") == {"NRestarts": "0"}


@pytest.mark.parametrize("frontend", ["thread", "process"])
def test_stop_drains(service: Service, frontend: str) -> None:
    service.override(f"Environment=KVD_FRONTEND={frontend}")
    service.machine.systemctl("start", "kvd")
    with service.client() as client:
        # its window is smaller than what is asked for: it is not over before it is read
        stream = client.generate(SYSTEM, stream=True, max_tokens=100, temperature=0.0, ignore_eos=True, window_tokens=8)
        tokens = list(next(stream).token_ids)
        stop = threading.Thread(target=lambda: service.machine.systemctl("stop", "kvd"))
        stop.start()
        wait_for(lambda: service.show("ActiveState") == {"ActiveState": "deactivating"}, service.describe)
        assert len(tokens) <= 8
        tokens += [token for chunk in stream for token in chunk.token_ids]
        stop.join()
    assert tokens == expected_tokens(SYSTEM.encode(), 100)
    ended = service.show("ActiveState", "Result", "ExecMainStatus", "NRestarts")
    assert ended == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0", "NRestarts": "0"}
    stopped = [record for record in service.machine.journal("kvd") if record["MESSAGE"].startswith("stopped")]
    assert [record["KVD_CLEAN"] for record in stopped] == ["True"]
    assert not (service.machine.root / SOCKET).exists()


def test_the_last_checkpoint_may_take_longer_than_watchdog_and_stop_timeout(service: Service) -> None:
    service.override(
        "WatchdogSec=2s", "TimeoutStopSec=2s", "Environment=KVD_CHECKPOINT_INTERVAL_S=1000 KVD_FAILPOINTS=store.before_commit=sleep:3"
    )
    service.machine.systemctl("start", "kvd")
    with service.client() as client:
        ask(client, "one")
        ask(client, "two")
    service.machine.systemctl("stop", "kvd")
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    service.override()
    service.machine.systemctl("start", "kvd")
    with service.client() as client:
        assert ask(client, "after the stop") >= NUM_SYSTEM_TOKENS


def test_a_wrong_configuration_is_not_restarted(service: Service) -> None:
    service.configure(FAKE + "[scheduler]\nmax_runing = 3\n")
    assert service.machine.systemctl("start", "kvd", check=False).returncode == 1
    ended = service.show("ActiveState", "Result", "ExecMainStatus", "NRestarts")
    assert ended == {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "78", "NRestarts": "0"}
    assert "max_runing" in service.messages()


def test_a_tcp_endpoint_with_curve_works_under_the_hardened_unit(service: Service, tmp_path: Path) -> None:
    machine = service.machine
    keys = {}
    for name in ("daemon", "client"):
        zmq.auth.create_certificates(tmp_path, name)
        keys[name] = zmq.auth.load_certificate(tmp_path / f"{name}.key")[0].decode()
        shutil.copyfile(tmp_path / f"{name}.key_secret", machine.root / f"etc/kvd/{name}.key_secret")
    machine.run("install", "-m", "640", "-g", "kvd", "/etc/kvd/daemon.key_secret", "/etc/kvd/daemon.key")
    (machine.root / "etc/kvd/clients").write_text(f"{keys['client']} # the only one\n", encoding="utf-8")
    curve = 'curve_key_file = "/etc/kvd/daemon.key"\ncurve_clients_file = "/etc/kvd/clients"\n'
    service.configure(FAKE + '[transport]\nlisten = ["ipc:///run/kvd/kvd.sock", "tcp://0.0.0.0:7411"]\n' + curve)
    machine.systemctl("start", "kvd")
    ping = ["kvd", "ping", "--connect", "tcp://127.0.0.1:7411", "--server-key", keys["daemon"]]
    machine.run(*ping, "--client-key-file", "/etc/kvd/client.key_secret")
    assert machine.run(*ping, "--timeout", "1", check=False).returncode != 0, "a client whose key is on no list"


def test_an_upgrade_keeps_the_configuration(service: Service) -> None:
    installer = "/usr/src/kvd/systemd/install.sh"
    service.configure(FAKE + "# an operator's own line\n")
    service.machine.run("sh", installer, "--unit-only")
    assert "an operator's own line" in (service.machine.root / "etc/kvd/kvd.toml").read_text(encoding="utf-8")
    assert service.machine.run("sh", installer, "--unit-only", user="kvd", check=False).returncode == 77
    assert service.machine.run("sh", installer, "--uninstall", check=False).returncode == 64


@pytest.mark.model
def test_the_real_model_runs_under_the_hardened_unit(service: Service, smollm2: Path) -> None:
    """bfloat16 matrix kernels are compiled at run time: hardening that forbids this shows here."""
    models = service.machine.root / "var/lib/kvd/models"
    models.mkdir(parents=True)
    shutil.copyfile(smollm2, models / "SmolLM2-135M-Instruct.Q4_1.gguf")
    service.machine.run("chown", "-R", "kvd:kvd", "/var/lib/kvd")
    service.configure('[model]\ndtype = "bfloat16"\n[cache]\nkv_memory = "128MiB"\n[storage]\ncheckpoint_interval_s = 0.2\n')
    service.machine.systemctl("start", "kvd")
    with service.client() as client:
        prompt = "The capital of France is a city on the river Seine, and its name is known all over the world. The capital of France is"
        first = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        client.checkpoint()
        assert "Paris" in first.text
        service.machine.systemctl("kill", "--signal=KILL", "kvd")
        service.await_restart(1)
        again = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert again.token_ids == first.token_ids
    assert again.usage.restored_tokens >= 16
    stats = service.machine.run("kvd", "stats", "--json", user="kvd").stdout
    assert "bfloat16" in stats
    service.machine.systemctl("stop", "kvd")
    assert service.show("Result") == {"Result": "success"}
