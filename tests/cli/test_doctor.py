"""kvd doctor: facts of this machine, and what would keep a daemon from running."""

from __future__ import annotations

import json
import os
import socket

import pytest

from kvd.cli import app, doctor
from kvd.cli.exits import Exit


@pytest.fixture(autouse=True)
def _places(monkeypatch, tmp_path):
    monkeypatch.setenv("KVD_EXECUTOR", "fake")
    monkeypatch.setenv("KVD_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("KVD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KVD_LISTEN", f"ipc://{tmp_path}/run/kvd.sock")
    monkeypatch.setattr(doctor, "_versions", lambda: iter([("kvd", "1.0")]))


def report_of(capsys, *arguments: str) -> tuple[int, dict]:
    code = app.main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_sound_machine(capsys, tmp_path):
    code, report = report_of(capsys)
    assert report["problems"] == []
    assert code == Exit.OK
    assert report["executor"] == {"executor": "fake"}
    assert report["cpu"]["usable_threads"] == len(os.sched_getaffinity(0))
    assert report["memory"]["total_bytes"] >= report["memory"]["available_bytes"] > 0
    assert report["state_dir"]["path"] == str(tmp_path / "state")
    assert report["state_dir"]["writable"] is True
    assert report["state_dir"]["exists"] is False
    assert report["listen"] == [{"endpoint": f"ipc://{tmp_path}/run/kvd.sock", "in_use": False, "writable": True}]
    assert set(report["limits"]) == {"open_files", "locked_memory", "address_space"}
    assert not (tmp_path / "state").exists(), "a doctor touches nothing"


def test_what_is_wrong_is_named_with_its_key(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("KVD_STATE_DIR", str(tmp_path / "file" / "state"))
    monkeypatch.setenv("KVD_EXECUTOR", "torch")
    monkeypatch.setattr(doctor, "_executor", lambda _: {"executor": "torch", "error": "ImportError: broken"})
    monkeypatch.setattr(doctor, "_versions", lambda: iter([("torch", "missing")]))
    code, report = report_of(capsys)
    assert code == Exit.CONFIG
    text = "\n".join(report["problems"])
    for words in ("torch is not installed", "ImportError: broken", "run: kvd pull smollm2", "storage.state_dir", "env KVD_STATE_DIR"):
        assert words in text


def test_for_people(capsys):
    assert app.main(["doctor"]) == Exit.OK
    text = capsys.readouterr().out
    assert "executor  executor fake" in text
    assert text.splitlines()[-1].split() == ["problems", "none"]


def test_an_endpoint_is_in_use_only_while_somebody_listens(capsys, tmp_path):
    path = tmp_path / "run" / "kvd.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        assert report_of(capsys)[1]["listen"][0]["in_use"] is True
    assert path.is_socket(), "left behind, as by a killed daemon"
    assert report_of(capsys)[1]["listen"][0]["in_use"] is False


@pytest.mark.parametrize(
    ("isa", "available", "features", "expected"),
    [
        ("avx512", ("portable", "avx2", "avx512"), (), ""),
        (
            "avx2",
            ("portable", "avx2"),
            ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
            "avx512 needs: avx512vbmi avx512_bf16",
        ),
        ("portable", ("portable",), ("avx2", "f16c"), "avx2 needs: fma"),
        ("portable", ("portable", "avx2"), (), "avx2 is there, but the environment chooses portable"),
    ],
)
def test_why_the_kernels_are_no_better(monkeypatch, isa, available, features, expected):
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert doctor._why_no_better(isa, available, features) == expected
