"""``make install`` as an operator runs it, on a machine of its own with the network of this one."""

from __future__ import annotations

import os

import pytest
from private_systemd import PrivateSystemd

pytestmark = [pytest.mark.systemd, pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]


def test_make_install_gives_a_service_that_answers(bare_machine: PrivateSystemd) -> None:
    """From a checkout that it can't write to, with the index that pip is configured for here."""
    pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    installed = bare_machine.run("make", "-C", "/usr/src/kvd", "install", env=pip, outer_network=True, timeout_s=800)
    assert "systemctl start kvd" in installed.stdout
    bare_machine.systemctl("start", "kvd")
    prompt = "The capital of France is"
    answer = bare_machine.run("kvd", "generate", "--prompt", prompt, "--max-tokens", "8", "--temperature", "0", user="kvd")
    assert "Paris" in answer.stdout
    bare_machine.systemctl("stop", "kvd")
    assert bare_machine.show("kvd", "Result", "NRestarts") == {"Result": "success", "NRestarts": "0"}
    for path, expected in {"opt/kvd/bin/kvd": "755 root root", "var/lib/kvd": "700 kvd kvd", "etc/kvd/kvd.toml": "644 root root"}.items():
        assert bare_machine.run("stat", "--format=%a %U %G", f"/{path}").stdout.strip() == expected
