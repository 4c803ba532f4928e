"""A forget that dies in the middle: by its intent the next start completes it, or it was not begun; and what is no intent is not completed."""

from __future__ import annotations

import pytest
from crc32c import crc32c
from forget_world import ACME, ACME_SALTED, KEPT, OTHERS, OWN, OWN_ROWS, SALTED, SECRET, WHOLE, forget, found_in, live, needles, victim
from storage_harness import World, crash

from kvd.observe import failpoints
from kvd.storage.errors import UnknownFormatError
from kvd.storage.forget_intent import INTENT_NAME, Mark, write_intent
from kvd.storage.tools import check_store

pytestmark = pytest.mark.store

POINTS = sorted(name for name in failpoints.NAMES if name.startswith("forget."))
INSIDE = ["store.create.before_rename@2", "store.create.after_rename@2", "store.current.before_rename@3", "store.current.after_rename@3"]


def test_every_step_has_its_failpoint():
    assert len(POINTS) >= 11


@pytest.mark.parametrize("point", [*POINTS, *INSIDE])
def test_killed_in_the_middle_it_is_forgotten_at_the_next_start_or_was_not_begun(tmp_path, point):
    name, _, passage = point.partition("@")
    status, said = victim(tmp_path, f"{name}=kill@{passage or 1}")
    assert status == -9, f"{point} was not reached"
    assert said == ["lived"], "it was not told as done"
    has_begun = (tmp_path / INTENT_NAME).exists() or name == "forget.after_done"
    assert has_begun == (point not in {"forget.before_intent", "forget.intent.before_sync", "forget.intent.before_rename"})
    world = World(tmp_path)
    if has_begun:
        assert world.cache.match(SECRET, ACME).num_tokens == 0, "it is not served any more"
        assert list(world.storage.recipe_book.recipes()) == ["rules"]
        world.until(lambda: not (tmp_path / INTENT_NAME).exists(), timeout_s=60)
        assert found_in(tmp_path, OWN | OWN_ROWS | needles(ACME_SALTED, SALTED)) == set()
    else:
        assert set(world.storage.recipe_book.recipes()) == {"acme/safe", "rules"}
        assert world.ask(SECRET, ACME) == 96
    assert world.ask(KEPT, OTHERS) == 96
    world.stop()
    assert check_store(tmp_path)["ok"]


@pytest.mark.parametrize("damage", [b"", b"KVDFGT\r\n", bytes(60)])
def test_an_intent_that_can_not_be_read_is_reported_and_not_completed(tmp_path, damage):
    world = World(tmp_path)
    live(world)
    crash(world)
    (tmp_path / INTENT_NAME).write_bytes(damage)
    world = World(tmp_path)
    assert any(INTENT_NAME in entry["what"] for entry in world.log.named("storage.damage"))
    assert world.ask(SECRET, ACME) == 96
    assert forget(world, WHOLE).error == ""
    assert found_in(tmp_path, OWN) == set()
    world.stop()


def test_an_intent_of_another_format_is_refused(tmp_path):
    crash(World(tmp_path))
    write_intent(tmp_path, [Mark("acme")])
    path = tmp_path / INTENT_NAME
    body = bytearray(path.read_bytes()[:-4])
    body[8] = 9
    path.write_bytes(body + crc32c(bytes(body)).to_bytes(4, "little"))
    with pytest.raises(UnknownFormatError, match="format 9"):
        World(tmp_path)
    assert path.exists()
