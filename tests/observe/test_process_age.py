"""The age of a process counts from exec."""

from __future__ import annotations

import subprocess
import sys
import time

from kvd.observe.process_age import process_age_s


def test_the_interpreters_own_start_is_counted():
    code = "from kvd.observe.process_age import process_age_s; import time; time.sleep(0.2); print(process_age_s())"
    begun_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.2 <= float(done.stdout) <= time.monotonic() - begun_s + 0.02


def test_it_grows():
    first = process_age_s()
    time.sleep(0.05)
    assert first > 0
    assert process_age_s() - first >= 0.04
