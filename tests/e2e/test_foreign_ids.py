"""Token ids that the model does not know, out of a pin set that was made by hand: they are never computed, and the first start comes up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess

from kvd.commands import Recipe, Submit
from kvd.config import StorageConfig
from kvd.pin_rendering import known_ids
from kvd.storage.pin_import import import_pins
from kvd.storage.pin_sets import new_pin_set
from kvd.text.model import BYTES, load_text_model
from kvd.types import SamplingParams, pack_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

VOCAB_SIZE = 257


def test_an_imported_pin_with_ids_beyond_the_vocabulary_is_kept_and_not_computed(tmp_path: Path) -> None:
    digest = load_text_model(BYTES).digest
    with new_pin_set(tmp_path / "pins") as writer:
        for name, highest in (("good", VOCAB_SIZE - 1), ("beyond", VOCAB_SIZE), ("far", (1 << 32) - 1)):
            writer.add(Recipe(name=name, token_ids=pack_tokens([*range(65, 96), highest]), tokenizer_digest=digest))
    import_pins(StorageConfig(state_dir=tmp_path / "state"), tmp_path / "pins")
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            pins = {pin["name"]: (pin["state"], pin["reason"]) for pin in client.prefixes()["pins"]}
            assert client.status()["store"]["failed_starts"] == 0
    assert pins == {
        "good": ("held", ""),
        "beyond": ("not_held", "token id 257 is beyond the model's vocabulary of 257"),
        "far": ("not_held", "token id 4294967295 is beyond the model's vocabulary of 257"),
    }


class _Log:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def warning(self, event: str, **fields: Any) -> None:
        assert event == "prefix_not_computed"
        self.reasons.append(fields["reason"])


def test_prefixes_to_be_computed_anew_are_held_to_the_same() -> None:
    def submit(token_ids: bytes) -> Submit:
        return Submit(request_id=bytes(16), token_ids=token_ids, sampling=SamplingParams(), max_tokens=1)

    log = _Log()
    good = submit(pack_tokens([0, VOCAB_SIZE - 1]))
    assert known_ids([submit(pack_tokens([VOCAB_SIZE])), good, submit(b"12345")], VOCAB_SIZE, log) == (good,)
    assert log.reasons == ["token id 257 is beyond the model's vocabulary of 257", "5 bytes are no whole tokens"]
