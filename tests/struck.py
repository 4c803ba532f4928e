"""A daemon that is struck by SIGTERM at a chosen place of its start, by its own hand: no place is missed, as it would be by waiting."""

from __future__ import annotations

from pathlib import Path

_HOOK = """
import os, signal, sys, threading

place = os.environ["STRUCK_AT"]
nth_lock = int(place) if place.isdigit() else 0
is_inside = is_over = False


def strike():
    global is_over
    sys.setprofile(None)
    if not is_over:  # what a library misses it may look for again
        is_over = True
        os.kill(os.getpid(), signal.SIGTERM)


def at_a_lock(frame, event, _arg):
    global nth_lock
    if event == "c_return" and frame.f_code is threading.Condition.__enter__.__code__:
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.endswith("/kvd/daemon.py"):
            caller = caller.f_back
        if caller is not None:
            nth_lock -= 1
            if nth_lock == 0:
                strike()


def in_a_function(_frame, event, arg):
    global is_inside
    if event == "c_call" and arg.__name__ == place:
        is_inside = True
    elif event == "call" and is_inside:
        strike()


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == place:
            strike()
        elif name == "torch.distributed" and not is_over:
            sys.setprofile(in_a_function)


if nth_lock:
    sys.setprofile(at_a_lock)
else:
    sys.meta_path.insert(0, Finder())
"""


def struck_at(root: Path, place: str | int) -> dict[str, str]:
    """The environment of a daemon on ``root`` that is struck at ``place``.

    That is a number: when the main thread takes its nth condition's lock in the daemon's ``run``; the name of a module: when that is looked for; or the
    name of a function of torch's C++ modules that ``torch.distributed`` is the first to call: when it calls back into Python.
    """
    (root / "hook").mkdir(exist_ok=True)
    (root / "hook" / "sitecustomize.py").write_text(_HOOK)
    return {"PYTHONPATH": str(root / "hook"), "STRUCK_AT": str(place)}
