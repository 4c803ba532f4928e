"""Two tenants with prompts and pins, what must not be found once one of them is forgotten, and a process that dies meanwhile.

Run as a script with a directory and a key's file or "", it is what the kill tests kill.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from storage_harness import FINGERPRINT, World, chain_of, crash, prompt, row_of

from kvd.cache.hashing import Namespace
from kvd.cache.tenants import Selection, tenant_salt
from kvd.commands import ForgetDone, Recipe

ACME = Namespace(FINGERPRINT, tenant_salt("acme", b""))
ACME_SALTED = Namespace(FINGERPRINT, tenant_salt("acme", b"night"))
OTHERS = Namespace(FINGERPRINT)
SECRET = prompt(7, 97, shared=32)
SALTED = prompt(8, 81)
KEPT = prompt(3, 97, shared=32)
TEXT = "the combination of the safe is left, right, left"
WHOLE = Selection("acme")
PREFIX = Selection("acme", ACME.tenant_salt, SECRET[: 4 * 64])


def live(world: World) -> None:
    """The same on both sides: blocks used often enough to be stored, and a pin each."""
    for namespace, token_ids in ((ACME, SECRET), (ACME, KEPT), (ACME_SALTED, SALTED), (OTHERS, KEPT), (OTHERS, SECRET[:128] + KEPT)):
        for _ in range(2):
            world.ask(token_ids, namespace)
    for name, namespace, token_ids, text in (("acme/safe", ACME, SECRET, TEXT), ("rules", OTHERS, KEPT, "the rules of the house")):
        world.cache.pin(name, token_ids, namespace)
        world.tick()
        recipe = Recipe(name=name, token_ids=token_ids, tokenizer_digest=b"", text=text, tenant_salt=namespace.tenant_salt)
        world.storage.recipe_book.put(name.encode(), recipe)
        assert not world.wait_for(name.encode()).error
    assert not world.checkpoint().error


def forget(world: World, selection: Selection, op_id: bytes = b"forget") -> ForgetDone:
    world.tick()
    world.cache.forget(selection)
    world.tick()
    pins = {name: each for name, each in world.storage.recipe_book.recipes().items() if selection.holds(each.tenant_salt, each.token_ids)}
    world.storage.forget(op_id, selection, pins)
    return world.until(lambda: world.inbox.find(op_id), timeout_s=60)


def needles(namespace: Namespace, token_ids: bytes, *, first: int = 0) -> dict[str, bytes]:
    """Token and KV bytes of a prompt's own blocks, and its last block's hash."""
    found = {}
    for index, key in enumerate(chain_of(token_ids, namespace)[first:], first):
        found[f"tokens {index}"] = token_ids[64 * index : 64 * index + 64]
        found[f"row {index}"] = row_of(key)[:200]
    return found


def found_in(state_dir: Path, wanted: dict[str, bytes]) -> set[str]:
    files = [path.read_bytes() for path in state_dir.rglob("*") if path.is_file()]
    return {name for name, needle in wanted.items() if any(needle in data for data in files)}


def clutter(state_dir: Path) -> None:
    """What an earlier misfortune may have left lying about."""
    (state_dir / "quarantine").mkdir(exist_ok=True)
    (state_dir / "quarantine" / "0000000000000001.wal").write_bytes(b"\0" * 100 + SECRET + TEXT.encode())
    aside = state_dir / "kv" / "9.aside"
    aside.mkdir()
    (aside / "data.mdb").write_bytes(SECRET)


OWN = needles(ACME, SECRET, first=2) | {"text": TEXT.encode()}
"""The first two blocks' tokens are in others' prompts too."""
OWN_ROWS = {name: needle for name, needle in needles(ACME, SECRET).items() if name.startswith("row")}


def victim(state_dir: Path, spec: str, key_file: str = "") -> tuple[int, list[str]]:
    environment = {**os.environ, "KVD_FAILPOINTS": spec}
    command = [sys.executable, __file__, str(state_dir), key_file]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode in {0, -9}, done.stderr
    return done.returncode, done.stdout.splitlines()


if __name__ == "__main__":
    the_world = World(Path(sys.argv[1]), store_encryption_key_file=sys.argv[2])
    live(the_world)
    print("lived", flush=True)
    assert not forget(the_world, WHOLE).error
    print("forgotten", flush=True)
    crash(the_world)
