"""Models whose weights stay quantised: the dequantised model's logits, the same bits however a prompt is cut, and what quantised weights cost in accuracy."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import json  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gguf_files import Shape, write_gguf  # noqa: E402

from kvd.config import CacheConfig, ModelConfig, SchedulerConfig  # noqa: E402
from kvd.executor.assemble import open_model  # noqa: E402
from kvd.executor.attention.backend import AttentionRows  # noqa: E402
from kvd.executor.input_batch import StepRows  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.inspect import inspect_model  # noqa: E402
from kvd.executor.models.spec import fit_length  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool  # noqa: E402
from kvd.executor.native_model import NativeModel, load_native_decoder  # noqa: E402

if native.status().isa is None:
    pytest.skip(native.status().reason, allow_module_level=True)

DATA = Path(__file__).parent.parent / "data"
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
MIXED = {"attn_v": "Q6_K", "ffn_up": "Q8_0", "ffn_down": "F16", "token_embd": "Q5_K"}
MAX_TOKENS = 512


class Served:
    """A model's logits behind every position of a prompt, in steps of given sizes."""

    def __init__(self, path, dtype, *, quantised):
        self.spec, _ = fit_length(inspect_model(path), 0)
        self.kv_type = dtype
        self.decoder = load_native_decoder(
            path,
            self.spec,
            dtype=getattr(torch, dtype),
            quantised=quantised,
            threads=2,
            max_model_len=MAX_TOKENS,
            max_step_tokens=256,
            progress=lambda _done, _total: None,
        )

    def logits(self, token_ids, sizes):
        model = NativeModel(self.decoder, NativeKvPool(self.spec, MAX_TOKENS // 16, self.kv_type))
        parts, first = [], 0
        for size in sizes:
            rows = AttentionRows(
                num_tokens=np.array([size]),
                num_computed=np.array([first]),
                starts=np.array([0, size]),
                positions=np.arange(first, first + size),
                token_rows=np.zeros(size, dtype=np.int64),
                block_tables=np.arange(MAX_TOKENS // 16, dtype=np.int32)[None],
            )
            nothing = np.zeros(0, dtype=np.int64)
            chunk = np.asarray(token_ids[first : first + size], dtype=np.int64)
            hidden = model.forward(StepRows(np.zeros(1, dtype=np.int64), rows, chunk, np.ones(1, dtype=bool), nothing))
            parts.append(hidden.logits(np.arange(size)).clone())
            first += size
        return torch.cat(parts)


def tiny(path, kind, shape="llama", **more):
    return write_gguf(path / "tiny.gguf", Shape(shape, head_dim=128 if shape == "qwen3" else 64), kind, **more)


@pytest.mark.parametrize(("shape", "kind"), [*(("llama", kind) for kind in KINDS), ("qwen2", "Q4_1"), ("qwen3", "Q8_0")])
def test_logits_are_those_of_the_dequantised_model(shape, kind, tmp_path):
    path = tiny(tmp_path, kind, shape)
    prompt = np.random.default_rng(0).integers(0, 96, 60)
    got, expected = (Served(path, "float32", quantised=quantised).logits(prompt, (60,)) for quantised in (True, False))
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=0)
    assert not torch.equal(got, expected)


def test_fused_matrices_of_several_formats(tmp_path):
    path = tiny(tmp_path, "Q4_K", kinds=MIXED)
    prompt = np.random.default_rng(0).integers(0, 96, 60)
    got, expected = (Served(path, "float32", quantised=quantised).logits(prompt, (60,)) for quantised in (True, False))
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_however_a_prompt_is_cut(kind, dtype, tmp_path):
    served = Served(tiny(tmp_path, kind), dtype, quantised=True)
    prompt = np.random.default_rng(0).integers(0, 96, 130)
    whole = served.logits(prompt, (130,))
    assert torch.equal(served.logits(prompt, (1, 5, 7, 37, 64, *([1] * 16))), whole)


def test_blocks_of_kept_and_of_converted_weights_are_never_taken_for_each_other(tmp_path):
    found = {}
    for kind in ("Q4_1", "Q5_K"):
        path = tiny(tmp_path, kind)
        for weights in ("auto", "dequantised"):
            opened = open_model(
                path,
                inspect_model(path),
                ModelConfig(device="cpu", dtype="float32", weights=weights),
                CacheConfig(kv_memory=1 << 22),
                SchedulerConfig(),
                threads=1,
                digest_cache=tmp_path / "digests.json",
            )
            found[kind, weights] = opened.kernel_family, opened.fingerprint
    kept, converted = found["Q4_1", "auto"], found["Q4_1", "dequantised"]
    assert kept[0] == f"{converted[0]}-quantised"
    assert kept[1] != converted[1]
    assert found["Q5_K", "auto"] == found["Q5_K", "dequantised"]


def divergence(logits, exact):
    """How often the likeliest token is the same, and the mean Kullback-Leibler divergence in nats."""
    logs, exact_logs = torch.log_softmax(logits, dim=-1), torch.log_softmax(exact, dim=-1)
    same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
    return float(same), float((exact_logs.exp() * (exact_logs - logs)).sum(-1).mean())


@pytest.mark.model
def test_smollm2_kept_quantised_is_as_near_to_the_exact_model_as_bfloat16_copies(smollm2):
    """Exact: the file's values in float32. Quantised weights are not rounded, bfloat16 copies of them are."""
    lines = (json.loads(line) for line in (DATA / "smollm2_reference.jsonl").read_text("utf-8").split("\n") if line)
    token_ids = [token for entry in lines for token in entry["token_ids"]][:256]
    sizes = (256,)
    exact = Served(smollm2, "float32", quantised=False).logits(token_ids, sizes)
    found = {}
    for name, dtype, quantised in (("float32", "float32", True), ("bfloat16", "bfloat16", True), ("bfloat16 copies", "bfloat16", False)):
        found[name] = divergence(Served(smollm2, dtype, quantised=quantised).logits(token_ids, sizes), exact)
        print(f"{name:15} same likeliest token {found[name][0]:.2%}, KL {found[name][1]:.2e} nats")
    assert found["float32"][0] > 0.99
    assert found["float32"][1] < 1e-6
    assert found["bfloat16"][0] > 0.96
    assert found["bfloat16"][1] < min(1e-3, 1.2 * found["bfloat16 copies"][1])
