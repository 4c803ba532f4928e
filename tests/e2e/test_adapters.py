"""LoRA adapters on a real daemon: by name, retrained, pinned, across kills; and whatever is wrong with one harms nobody else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from kvd_client import Client, errors
from lora_directories import make_adapter

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

SIZES = {"model.layers.0.self_attn.q_proj": (16, 16), "model.layers.0.self_attn.v_proj": (8, 16)}
EXAMPLE = Path(__file__).parents[2] / "clients" / "python" / "examples" / "adapters.py"
PROMPT = "Every visitor signs the ledger before the tour begins, be it morning or noon."


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    directory = tmp_path / "adapters"
    for seed, name in enumerate(("poet", "clerk", "judge")):
        make_adapter(directory / name, SIZES, seed=seed)
    (directory / "no adapter").mkdir()
    (directory / "notes.txt").write_text("x")
    return directory


def daemon(tmp_path: Path, adapters: Path, *arguments: str) -> DaemonProcess:
    return DaemonProcess(tmp_path, "--adapter-dir", str(adapters), *arguments)


def ask(client: Client, adapter: str = "", prompt: str = PROMPT) -> tuple[tuple[int, ...], int]:
    """The answer, and how much of the prompt was cached, in whole blocks."""
    answer = client.generate(prompt, max_tokens=12, temperature=0.0, ignore_eos=True, **({"adapter": adapter} if adapter else {}))
    return answer.choices[0].token_ids, answer.usage.cached_tokens // 16 * 16


def kvd(process: DaemonProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvd", *arguments, "--connect", process.endpoint]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_by_name_retrained_and_across_a_kill(tmp_path: Path, adapters: Path) -> None:
    with daemon(tmp_path, adapters, "--max-adapters", "2") as process:
        process.wait_ready()
        with process.client() as client:
            answers = {name: ask(client, name) for name in ("", "poet", "clerk", "judge")}
            assert len({token_ids for token_ids, _ in answers.values()}) == 4
            assert {cached for _, cached in answers.values()} == {0}
            states = {each.name: each.state for each in client.adapters()}
            assert states == {"clerk": "loaded", "judge": "loaded", "poet": "on disk"}
            assert client.status()["adapters"]["max_adapters"] == 2
            assert ask(client, "poet") == (answers["poet"][0], 64)
            old = next(each.digest for each in client.adapters() if each.name == "poet")
            make_adapter(adapters / "poet", SIZES, seed=99)
            assert ask(client, "poet")[0] == answers["poet"][0], "what is loaded stays until it is loaded anew"
            assert client.load_adapter("poet").digest != old
            retrained = ask(client, "poet")
            assert retrained[1] == 0
            assert retrained[0] not in {token_ids for token_ids, _ in answers.values()}
            assert client.unload_adapter("poet").state == "unloaded"
            client.pin("rules", PROMPT, adapter="poet")
            assert ask(client, "poet") == (retrained[0], 64)
            listed = kvd(process, "adapter", "list")
            assert "poet" in listed.stdout
            assert kvd(process, "adapter", "load", "nobody").returncode == 66
        process.kill()
    with daemon(tmp_path, adapters) as process:
        process.wait_ready()
        with process.client() as client:
            assert [each["name"] for each in client.status()["adapters"]["loaded"]] == ["poet"], "the pin's was read before READY"
            (pin,) = client.prefixes()["pins"]
            assert (pin["state"], pin["adapter"]) == ("held", "poet")
            answer = client.generate(PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True, adapter="poet")
            assert (answer.choices[0].token_ids, answer.usage.restored_tokens) == (retrained[0], 64)
            assert ask(client) == (answers[""][0], 0)


def test_a_pin_follows_its_adapter_and_outlives_it(tmp_path: Path, adapters: Path) -> None:
    with daemon(tmp_path, adapters) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", PROMPT, adapter="poet")
            client.pin("laws", PROMPT, adapter="judge")
            before = ask(client, "poet")[0]
            with pytest.raises(errors.NotFound, match="no adapter is named 'nobody'"):
                client.pin("dreams", PROMPT, adapter="nobody")
        process.kill()
    make_adapter(adapters / "poet", SIZES, seed=50)
    shutil.rmtree(adapters / "judge")
    with daemon(tmp_path, adapters) as process:
        process.wait_ready()
        with process.client() as client:
            pins = {pin["name"]: pin for pin in client.prefixes()["pins"]}
            assert pins["rules"]["state"] == "held"
            assert pins["laws"]["state"] == "not_held"
            assert "no adapter is named 'judge'" in pins["laws"]["reason"]
            token_ids, cached = ask(client, "poet")
            assert cached == 64
            assert token_ids != before
        process.terminate()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            reasons = {pin["name"]: pin["reason"] for pin in client.prefixes()["pins"]}
            assert all("without adapter_dir" in reason for reason in reasons.values()), reasons
            with pytest.raises(errors.NotFound, match="without adapter_dir"):
                ask(client, "poet")
            assert client.adapters() == ()


def test_what_is_wrong_is_said(tmp_path: Path, adapters: Path) -> None:
    (adapters / "clerk" / "adapter_config.json").write_text("{")
    (adapters / "judge" / "adapter_model.safetensors").unlink()
    with daemon(tmp_path, adapters, "--max-adapters", "1", "--fake-step-ms", "20") as process:
        process.wait_ready()
        with process.client() as client:
            for name, error, message in (
                ("clerk", errors.AdapterUnusable, "not JSON"),
                ("judge", errors.AdapterUnusable, "no such file"),
                ("nobody", errors.NotFound, "no such subdirectory"),
                ("../adapters/poet", errors.BadRequest, "adapter must have"),
                ("x" * 129, errors.BadRequest, "adapter must have"),
            ):
                with pytest.raises(error, match=message):
                    ask(client, name)
            with pytest.raises(errors.NotFound, match="no adapter is loaded"):
                client.unload_adapter("poet")
            make_adapter(adapters / "judge", SIZES, seed=7)
            with client.generate(PROMPT, max_tokens=500, ignore_eos=True, adapter="poet", stream=True) as running:
                next(running)
                with pytest.raises(errors.AdapterCapacity) as refused:
                    client.load_adapter("judge")
                assert refused.value.retryable
                ids = list(PROMPT.encode())  # a text's time may be over before it is tokenised
                with pytest.raises(errors.QueueTimeout, match="its adapter was not there"):
                    client.generate(ids, max_tokens=1, adapter="judge", queue_timeout_s=0.2)
            assert ask(client, "judge")[0]


def test_a_directory_that_is_not_there_is_a_wrong_configuration(tmp_path: Path) -> None:
    with daemon(tmp_path, tmp_path / "nowhere") as process:
        assert process.wait_dead() == 78
        assert f"adapter_dir = {tmp_path / 'nowhere'}: no such directory" in process.log()


def test_only_what_may_be_named_is_listed_while_an_old_one_is_in_use(tmp_path: Path, adapters: Path) -> None:
    (adapters / "judge" / "adapter_config.json").write_text("{")
    long = {"max_tokens": 1500, "ignore_eos": True, "stream": True, "window_tokens": 2000}
    with daemon(tmp_path, adapters, "--fake-step-ms", "20") as process:
        process.wait_ready()
        with process.client() as client:
            with pytest.raises(errors.AdapterUnusable):
                ask(client, "judge")
            with (
                client.generate(PROMPT, adapter="poet", **long) as of_the_old_one,  # type: ignore[call-overload]
                client.generate(PROMPT, adapter="clerk", **long) as of_an_unloaded_one,  # type: ignore[call-overload]
            ):
                next(of_the_old_one)
                next(of_an_unloaded_one)
                make_adapter(adapters / "poet", SIZES, seed=99)
                client.load_adapter("poet")
                assert client.unload_adapter("clerk").state == "in use"
                states = {each.name: each.state for each in client.adapters()}
                assert states == {"clerk": "on disk", "judge": "unusable", "poet": "loaded"}
                held = client.status()["adapters"]
                assert [each["name"] for each in held["loaded"]] == ["poet"]
                assert [each["requests"] for each in held["unloading"]] == [1, 1]
                listed = json.loads(kvd(process, "adapter", "list", "--json").stdout)["adapters"]
                assert {each["name"]: each["state"] for each in listed} == states
                assert "2 unloading (2 requests)" in kvd(process, "status").stdout
                example = subprocess.run(
                    [sys.executable, EXAMPLE, "--connect", process.endpoint], capture_output=True, text=True, check=False, timeout=60
                )
                assert example.returncode == 0, example.stderr
                assert {line.split(":")[0].split(" is ")[0] for line in example.stdout.splitlines()} == {"base model", *states}
            assert {each.name for each in client.adapters()} == set(states)
