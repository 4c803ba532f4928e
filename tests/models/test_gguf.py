"""GGUF files: storage types and families against transformers' own reading of the same file, the header against the gguf package's reader."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_attention import greedy, prompt_logits
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from gguf_files import Shape, write_gguf, yarn_metadata
from reference_models import (
    LLAMA3_ROPE,
    TOLERATED_MARGIN,
    first_divergence,
    random_prompt,
    reference_greedy,
    reference_logits,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvd.executor.models.gguf_file import STORAGE_TYPES, open_gguf
from kvd.executor.models.inspect import inspect_model
from kvd.executor.models.spec import ModelError, RopeType, UnsupportedModelError, WeightsError, fit_length
from kvd.executor.models.weights.gguf import GgufSource
from kvd.executor.models.weights.load import load_decoder

pytestmark = [pytest.mark.torch, pytest.mark.oracle]

ATOL = 2e-5
PROMPT_TOKENS = 100
SHAPES = {
    "llama": Shape("llama"),
    "llama-tied": Shape("llama", tied=True, heads=4, kv_heads=1, head_dim=128),
    "qwen2": Shape("qwen2"),
    # transformers does not read the head dimension of qwen3 files and takes 128.
    "qwen3": Shape("qwen3", head_dim=128),
}
CASES = [("llama", kind) for kind in STORAGE_TYPES] + [("llama-tied", "Q6_K"), ("qwen2", "Q5_K"), ("qwen2", "F16"), ("qwen3", "Q4_1")]


def load(path: Path, dtype: torch.dtype = torch.float32):
    spec, _ = fit_length(inspect_model(path), 0)
    return load_decoder(path, spec, dtype=dtype, device="cpu")


def reference(path: Path, **config: Any) -> Any:
    """The file as transformers reads it; ``config`` replaces what it does not read."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    if not config:
        return model.eval()
    values = {**model.config.to_dict(), **config}
    changed = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.float32)
    changed.load_state_dict(model.state_dict())
    return changed.eval()


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(shape: str, kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES[shape], kind)
    model, decoder = reference(path), load(path)
    prompt = random_prompt(PROMPT_TOKENS, SHAPES[shape].vocab)
    torch.testing.assert_close(prompt_logits(decoder, prompt), reference_logits(model, prompt), atol=ATOL, rtol=0)
    expected = reference_greedy(model, prompt, 64)
    divergence = first_divergence(greedy(decoder, prompt, 64), expected)
    assert divergence is None or divergence[1] < TOLERATED_MARGIN, divergence
    assert len(set(expected.token_ids)) > 5
    assert decoder.spec.quantisation == (kind if kind.startswith("Q") else "")
    assert decoder.spec.weights_dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


@pytest.mark.parametrize("kind", STORAGE_TYPES)
def test_tensors_are_those_the_gguf_package_dequantises_whatever_the_runs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["qwen2"], kind)
    monkeypatch.setattr("kvd.executor.models.weights.gguf._RUN_BYTES", 1)
    source = GgufSource(path, inspect_model(path))
    for tensor in GGUFReader(path).tensors:
        expected = dequantize(np.array(tensor.data), GGMLQuantizationType(tensor.tensor_type)).astype(np.float32)
        runs = list(source.read(tensor.name))
        assert torch.equal(torch.cat(runs), torch.from_numpy(expected.copy()))
        assert source.shapes[tensor.name] == expected.shape
        assert source.sizes_bytes[tensor.name] == tensor.n_bytes
        if expected.ndim == 2:
            assert {run.shape[0] for run in runs[:-1]} <= {64}


def test_runs_of_rows_do_not_change_the_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "Q4_0")
    prompt = random_prompt(20, SHAPES["llama"].vocab)
    whole = prompt_logits(load(path), prompt)
    monkeypatch.setattr("kvd.executor.models.weights.gguf._RUN_BYTES", 1)
    assert torch.equal(prompt_logits(load(path), prompt), whole)


def test_progress_counts_stored_bytes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "Q4_0")
    calls: list[tuple[int, int]] = []
    load_decoder(path, inspect_model(path), dtype=torch.bfloat16, device="cpu", progress=lambda *call: calls.append(call))
    total = sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)
    assert calls[-1] == (total, total)


@pytest.mark.parametrize(
    ("metadata", "parameters"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (yarn_metadata(4.0, 32), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        (
            {**yarn_metadata(4.0, 32), "rope.scaling.attn_factor": 0.75, "rope.scaling.yarn_beta_fast": 16.0},
            # transformers' factor is the whole, the file's multiplies the usual one: 0.1 ln 4 + 1
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 0.75 * (0.1 * math.log(4.0) + 1),
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_scaled_ropes(metadata: dict[str, Any], parameters: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "F32", metadata=metadata)
    model = reference(path, rope_parameters={**parameters, "rope_theta": 5000.0})
    prompt = random_prompt(PROMPT_TOKENS, SHAPES["llama"].vocab)
    torch.testing.assert_close(prompt_logits(load(path), prompt), reference_logits(model, prompt), atol=ATOL, rtol=0)


def test_llama3_scaling_comes_as_divisors(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", SHAPES["llama"], "F32")
    parameters = {**LLAMA3_ROPE, "rope_theta": 5000.0}
    model = reference(plain, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config)
    unscaled = 1.0 / 5000.0 ** (torch.arange(0, 64, 2).float() / 64)
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "F32", divisors=(unscaled / scaled).tolist())
    assert inspect_model(path).rope.type is RopeType.DIVISORS
    prompt = random_prompt(PROMPT_TOKENS, SHAPES["llama"].vocab)
    torch.testing.assert_close(prompt_logits(load(path), prompt), reference_logits(model, prompt), atol=ATOL, rtol=0)
    assert (prompt_logits(load(plain), prompt) - reference_logits(model, prompt)).abs().max() > 100 * ATOL


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["qwen2"], "Q8_0", metadata={"some.list": [1.5, 2.5], "some.flag": True, "some.big": 7})
    _assert_same_header(path)


def _assert_same_header(path: Path) -> None:
    file, reader = open_gguf(path), GGUFReader(path)
    strings = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "general.languages", "general.tags"}
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.") and key not in strings}
    assert file.metadata == expected
    assert {tensor.name: tensor.data_offset for tensor in reader.tensors} == {
        name: item.offset_bytes for name, item in file.tensors.items()
    }
    assert [tensor.tensor_type.name for tensor in reader.tensors] == [item.storage for item in file.tensors.values()]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, r"llama\.expert_count .mixture of experts. is not supported"),
        ({"attention.sliding_window": 64}, r"attention\.sliding_window"),
        ({"attention.value_length": 32}, r"attention\.value_length differs from the head dimension 64"),
        ({"rope.dimension_count": 32}, r"rope\.dimension_count differs"),
        (
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
            "rope scaling 'longrope' is not supported in GGUF files; supported: none",
        ),
        ({**yarn_metadata(2.0, 64), "rope.scaling.yarn_ext_factor": 0.5}, "extrapolation factor"),
        ({"attention.head_count_kv": [2, 4]}, r"llama\.attention\.head_count_kv differs by layer"),
        ({"attention.causal": False}, "not causal"),
        ({"logit_scale": 2.0}, r"logit_scale"),
        ({"split.count": 2}, "one part of a split GGUF file"),
    ],
)
def test_features_that_are_not_computed_are_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "F32", metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        inspect_model(path)
    assert str(path) in str(caught.value)


def test_other_architectures_are_refused_with_what_is_supported(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", Shape("gemma2"), "F32")
    with pytest.raises(UnsupportedModelError, match="architecture 'gemma2' is not supported; supported: Llama 2"):
        inspect_model(path)


def test_other_storage_types_are_refused_with_what_is_supported(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "Q5_0")
    with pytest.raises(UnsupportedModelError, match=r"token_embd\.weight is stored as Q5_0; supported: F32, F16, BF16, Q8_0"):
        inspect_model(path)


def test_two_scalings_at_once_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "F32", metadata={"rope.scaling.factor": 2.0}, divisors=[1.0] * 32)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight together with rope scaling 'linear'"):
        inspect_model(path)


def test_metadata_of_a_wrong_type_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "F32", metadata={"block_count": "two"})
    with pytest.raises(ModelError, match=r"llama\.block_count must be an integer, is 'two'"):
        inspect_model(path)


@pytest.mark.parametrize(
    "key",
    [
        "embedding_length",
        "context_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
    ],
)
def test_a_size_of_nothing_is_named(key: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "F32", metadata={key: 0})
    with pytest.raises(ModelError, match=rf"tiny\.gguf: metadata llama\.{re.escape(key)} is 0, must be positive"):
        inspect_model(path)


def test_a_yarn_over_no_positions_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "F32", metadata=yarn_metadata(2.0, 0))
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.original_context_length is 0, must be positive"):
        inspect_model(path)


@pytest.mark.parametrize("theta", [0.0, -10_000.0, 1.0, 1e-30, math.nan, math.inf])
def test_a_base_that_gives_no_frequencies_is_named(theta: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "F32", metadata={"rope.freq_base": theta})
    with pytest.raises(ModelError, match=r"metadata llama\.rope\.freq_base (is .*, must be more than 1|must be a number, is (nan|inf))"):
        inspect_model(path)


def test_layer_lists_of_equal_numbers_are_numbers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SHAPES["llama"], "F32", metadata={"attention.head_count_kv": [2, 2]})
    assert inspect_model(path).num_kv_heads == 2


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "fewer.gguf", Shape("llama"), "F32", metadata={"block_count": 3})
    with pytest.raises(WeightsError, match=r"blk\.2\.attn_norm\.weight is missing"):
        load(path)
    path = write_gguf(tmp_path / "more.gguf", Shape("llama"), "F32", metadata={"block_count": 1})
    with pytest.raises(WeightsError, match=r"blk\.1\.attn_k\.weight and 8 more is unexpected"):
        load(path)
    path = write_gguf(tmp_path / "wide.gguf", Shape("llama"), "F32", metadata={"feed_forward_length": 512})
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_gate\.weight has shape \[256, 256\], expected \[512, 256\]"):
        load(path)


def test_a_file_cut_anywhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", Shape("llama", layers=1), "Q4_0").read_bytes()
    cut = tmp_path / "cut.gguf"
    header_bytes = min(tensor.offset_bytes for tensor in open_gguf(tmp_path / "tiny.gguf").tensors.values())
    for size in [*range(4, header_bytes, 37), header_bytes, len(whole) - 64]:
        cut.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"cut\.gguf: truncated GGUF file"):
            inspect_model(cut)
    cut.write_bytes(whole[:-64])
    with pytest.raises(WeightsError, match=r"tensor blk\.0\.ffn_norm\.weight ends beyond"):
        inspect_model(cut)


def moved(path: Path, name: str, move: int) -> Path:
    """The file with another place of one tensor in its header: the eight bytes after name, dimensions and type."""
    whole = bytearray(path.read_bytes())
    at = whole.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    at += 4 + 8 * struct.unpack_from("<I", whole, at)[0] + 4
    struct.pack_into("<Q", whole, at, struct.unpack_from("<Q", whole, at)[0] + move)
    path.write_bytes(whole)
    return path


@pytest.mark.parametrize("move", [-1, 1, 4, 16])
def test_a_tensor_that_is_not_aligned_is_damage(move: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", Shape("llama", layers=1), "Q4_0")
    with pytest.raises(WeightsError, match=r"tiny\.gguf: damaged GGUF file: tensor output\.weight lies at \d+, not aligned to 32 bytes"):
        inspect_model(moved(path, "output.weight", move))


@pytest.mark.parametrize("move", [-32, 32])
def test_tensors_that_overlap_are_damage(move: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", Shape("llama", layers=1), "Q4_0")
    other = r"blk\.0\.attn_q\.weight" if move > 0 else r"token_embd\.weight"
    pair = rf"output\.weight and {other}" if move > 0 else rf"{other} and output\.weight"
    with pytest.raises(WeightsError, match=rf"tiny\.gguf: damaged GGUF file: tensors {pair} overlap"):
        inspect_model(moved(path, "output.weight", move))


def test_tensors_in_the_same_place_are_damage(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", Shape("llama", layers=1), "F32")
    size = open_gguf(path).tensors["token_embd.weight"].size_bytes
    with pytest.raises(WeightsError, match=r"tensors token_embd\.weight and output\.weight overlap"):
        inspect_model(moved(path, "output.weight", -size))


@pytest.mark.parametrize("alignment", [0, 1, 4, 24])
def test_an_alignment_that_cannot_be_is_damage(alignment: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", Shape("llama", layers=1), "F32", metadata={"general.alignment": alignment})
    with pytest.raises(WeightsError, match=f"damaged GGUF file: alignment {alignment}"):
        inspect_model(path)


def test_a_flipped_header_byte_is_a_named_error_or_another_description(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "tiny.gguf", Shape("llama", layers=1), "Q4_0").read_bytes())
    header_bytes = min(tensor.offset_bytes for tensor in open_gguf(tmp_path / "tiny.gguf").tensors.values())
    flipped = tmp_path / "flipped.gguf"
    for position in range(4, header_bytes, 11):
        damaged = whole.copy()
        damaged[position] ^= 0xFF
        flipped.write_bytes(damaged)
        try:
            spec = inspect_model(flipped)
        except ModelError as error:
            assert "flipped.gguf" in str(error)  # noqa: PT017
        else:
            assert spec.num_layers > 0


@pytest.mark.parametrize("num_layers", [2**31, 0])
def test_a_number_of_layers_that_the_file_cannot_hold_is_an_error(num_layers: int, tmp_path: Path) -> None:
    """One flipped bit; nothing of that size is made before it is noticed."""
    path = write_gguf(tmp_path / "tiny.gguf", Shape("llama"), "F32", metadata={"block_count": num_layers})
    with pytest.raises(ModelError, match=f"num_layers is {num_layers}, but the file has 21 tensors"):
        inspect_model(path)


def test_arrays_of_arrays_without_end_are_damage(tmp_path: Path) -> None:
    arrays = [struct.pack("<IQ", 9, 1)] * 2000
    (tmp_path / "deep.gguf").write_bytes(struct.pack("<4sIQQQ3sI", b"GGUF", 3, 0, 1, 3, b"key", 9) + b"".join(arrays))
    with pytest.raises(WeightsError, match="damaged GGUF file: arrays are nested more than 4 deep"):
        inspect_model(tmp_path / "deep.gguf")


def test_an_empty_file_and_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="not a GGUF file"):
        inspect_model(tmp_path / "empty.gguf")
    (tmp_path / "old.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))
    with pytest.raises(UnsupportedModelError, match="GGUF version 1 is not supported; supported: 2, 3"):
        inspect_model(tmp_path / "old.gguf")


def test_a_file_without_an_embedding_is_an_error(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "none.gguf", "llama")
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(WeightsError, match=r"token_embd\.weight is missing"):
        inspect_model(tmp_path / "none.gguf")
