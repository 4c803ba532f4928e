"""Ctrl-C at any moment of a command's start and end is exit code 130 and not a word."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from kvd.cli import interrupts
from kvd.cli.exits import Exit

AT_AN_IMPORT = """
import os, signal, sys

wanted = sys.argv.pop(1)

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
from kvd.__main__ import main
sys.exit(main())
"""

AT_THE_END = """
import atexit, os, signal, sys
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
from kvd.__main__ import main
sys.exit(main())
"""


def ended(code: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", ["kvd.cli.app", "click", "kvd.cli.status", "kvd_client.client"])
def test_ctrl_c_during_an_import(module):
    assert ended(AT_AN_IMPORT, module, "status", "--connect", "ipc:///absent", "--timeout", "1") == (Exit.INTERRUPTED, "")


def test_ctrl_c_when_all_is_over():
    assert ended(AT_THE_END, "version") == (Exit.INTERRUPTED, "")


def test_an_ignored_ctrl_c_stays_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.end_at_once()
        interrupts.raise_again()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_the_exception_comes_back_for_what_must_be_undone():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupts.end_at_once()
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    interrupts.raise_again()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
