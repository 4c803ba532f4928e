"""The KV fingerprint: what changes it, what does not, and that its file cache can only cost time."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.executor.models import fingerprint as fingerprint_module
from kvd.executor.models.fingerprint import _check_of, _read_cache, encode_field, fingerprint
from kvd.executor.models.spec import Architecture, ModelSpec, RopeSpec, RopeType, UnsupportedModelError, WeightsError, fit_length

SPEC = ModelSpec(
    architecture=Architecture.LLAMA,
    name="tiny",
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=32,
    max_positions=64,
    rms_norm_eps=1e-6,
    rope=RopeSpec(),
    windows=(0, 0),
    qkv_bias=False,
    qk_norm=False,
    tied_head=True,
    eos_token_ids=(2,),
    weights_format="safetensors",
    weights_dtype="float32",
)
SETTINGS = {"dtype": "float32", "block_size_tokens": 16, "layout": "block-major", "kernel_family": "reference"}


def later() -> int:
    """A clock at which every file has been at rest for long."""
    return time.time_ns() + 3600 * 10**9


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights" * 1000)
    return directory


def test_equal_contents_under_another_path_have_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    digest = fingerprint(model, SPEC, **SETTINGS)
    assert len(digest) == 32
    assert fingerprint(moved, replace(SPEC, name="other", eos_token_ids=(1, 2)), **SETTINGS) == digest


def test_everything_that_kv_depends_on_changes_the_fingerprint(model: Path) -> None:
    specs = [
        SPEC,
        replace(SPEC, rope=RopeSpec(theta=10_001.0)),
        replace(SPEC, rope=RopeSpec(type=RopeType.LINEAR, factor=2.0)),
        replace(SPEC, windows=(0, 8)),
        replace(SPEC, rms_norm_eps=1e-5),
        replace(SPEC, quantisation="Q4_1"),
        replace(SPEC, num_heads=4),
    ]
    digests = [fingerprint(model, spec, **SETTINGS) for spec in specs]
    digests += [
        fingerprint(model, SPEC, **{**SETTINGS, "dtype": "bfloat16"}),
        fingerprint(model, SPEC, **{**SETTINGS, "block_size_tokens": 32}),
        fingerprint(model, SPEC, **{**SETTINGS, "layout": "head-major"}),
        fingerprint(model, SPEC, **{**SETTINGS, "kernel_family": "fused"}),
    ]
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(3000)
        file.write(b"W")
    digests.append(fingerprint(model, SPEC, **SETTINGS))
    assert len(set(digests)) == len(digests)


def test_the_format_version_is_part_of_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(model, SPEC, **SETTINGS)
    monkeypatch.setattr(fingerprint_module, "KV_FORMAT_VERSION", fingerprint_module.KV_FORMAT_VERSION + 1)
    assert fingerprint(model, SPEC, **SETTINGS) != before


def test_only_a_length_dependent_rope_ties_the_fingerprint_to_max_model_len(model: Path) -> None:
    dynamic = replace(SPEC, rope=RopeSpec(type=RopeType.DYNAMIC, factor=2.0, original_max_positions=32))

    def at(spec: ModelSpec, length: int) -> bytes:
        return fingerprint(model, fit_length(spec, length)[0], **SETTINGS)

    assert at(SPEC, 16) == at(SPEC, 64)
    assert at(dynamic, 16) != at(dynamic, 64)


def test_contents_split_differently_over_files_differ(tmp_path: Path) -> None:
    digests = set()
    for split in (1, 2):
        directory = tmp_path / str(split)
        directory.mkdir()
        (directory / "a.safetensors").write_bytes(b"abcd"[:split])
        (directory / "b.safetensors").write_bytes(b"abcd"[split:])
        digests.add(fingerprint(directory, SPEC, **SETTINGS))
    assert len(digests) == 2


def test_a_settled_file_is_hashed_once(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "fingerprints.json"
    digest = fingerprint(model, SPEC, **SETTINGS, cache_file=cache, now_ns=later)
    content = json.loads(cache.read_text())
    ((key, _),) = content["sha256"].items()
    # A planted digest shows that the second run believes the cache and does not read the file.
    content["sha256"][key] = "00" * 32
    content["check"] = _check_of(content["sha256"])
    cache.write_text(json.dumps(content))
    assert fingerprint(model, SPEC, **SETTINGS, cache_file=cache, now_ns=later) != digest
    # A touched file is another file.
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert fingerprint(model, SPEC, **SETTINGS, cache_file=cache, now_ns=later) == digest


def test_no_flipped_bit_and_no_cut_of_the_cache_makes_another_fingerprint(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "fingerprints.json"
    fingerprint(model, SPEC, **SETTINGS, cache_file=cache, now_ns=later)
    content, known = cache.read_bytes(), _read_cache(cache)
    assert known
    for length in range(len(content)):
        cache.write_bytes(content[:length])
        assert _read_cache(cache) == {}
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        cache.write_bytes(flipped)
        assert _read_cache(cache) in ({}, known)


def test_a_file_changed_a_moment_ago_is_not_remembered(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "fingerprints.json"
    fingerprint(model, SPEC, **SETTINGS, cache_file=cache, now_ns=lambda: (model / "model.safetensors").stat().st_ctime_ns)
    assert not cache.exists()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 1}',
        b'{"version": 1, "sha256": [1]}',
        b'{"version": 2, "sha256": {}}',
        b'{"version": 1, "sha256": {"k": "zz"}}',
        b'{"version": 1, "sha256": {"k": "00"}}',
        b'{"version": 1, "sha256": {"k": 7}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_cache_is_ignored_and_replaced(model: Path, tmp_path: Path, damage: bytes) -> None:
    cache = tmp_path / "fingerprints.json"
    cache.write_bytes(damage)
    assert fingerprint(model, SPEC, **SETTINGS, cache_file=cache, now_ns=later) == fingerprint(model, SPEC, **SETTINGS)
    assert len(json.loads(cache.read_text())["sha256"]) == 1
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("fingerprints")] == ["fingerprints.json"]


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path.with_name("nowhere"))], ids=["fifo", "folder", "link"]
)
def test_what_is_no_file_is_no_cache(model: Path, tmp_path: Path, make) -> None:
    cache = tmp_path / "fingerprints"
    make(cache)
    assert fingerprint(model, SPEC, **SETTINGS, cache_file=cache, now_ns=later) == fingerprint(model, SPEC, **SETTINGS)


def test_a_cache_that_cannot_be_written_is_no_error(model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "fingerprints.json"
    assert fingerprint(model, SPEC, **SETTINGS, cache_file=missing, now_ns=later) == fingerprint(model, SPEC, **SETTINGS)


def test_the_cache_is_bounded(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "fingerprints.json"
    digests = {f"1:{inode}:1:1:1": "11" * 32 for inode in range(2000)}
    cache.write_text(json.dumps({"version": 2, "sha256": digests, "check": _check_of(digests)}))
    fingerprint(model, SPEC, **SETTINGS, cache_file=cache, now_ns=later)
    kept = json.loads(cache.read_text())["sha256"]
    assert len(kept) == 512
    assert str((model / "model.safetensors").stat().st_ino) in [key.split(":")[1] for key in kept]


def test_missing_and_pickled_weights_are_errors(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no weights.*model\.safetensors"):
        fingerprint(tmp_path, SPEC, **SETTINGS)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        fingerprint(tmp_path, SPEC, **SETTINGS)
    with pytest.raises(WeightsError, match=r"gone\.gguf"):
        fingerprint(tmp_path / "gone.gguf", SPEC, **SETTINGS)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def shape(value: object) -> object:
    """The value with its types made explicit, because True == 1 == 1.0 in Python."""
    match value:
        case dict():
            return ("d", tuple(sorted((key, repr(shape(item))) for key, item in value.items())))
        case list():
            return ("l", tuple(shape(item) for item in value))
        case _:
            return (type(value).__name__, repr(value))


@given(VALUES, VALUES)
def test_encoded_fields_are_equal_exactly_where_the_values_are(first: object, second: object) -> None:
    assert (encode_field(first) == encode_field(second)) == (shape(first) == shape(second))


def test_encoded_fields_separate_neighbours() -> None:
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), (b"a", "bc"), (1, 2), (12, ""), (("a",), ("bc",)), (("a", "bc"), ())]
    encoded = [encode_field(first) + encode_field(second) for first, second in pairs]
    assert all(left != right for left, right in itertools.combinations(encoded, 2))
