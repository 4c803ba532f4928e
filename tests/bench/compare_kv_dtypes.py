"""What keeping K and V in fewer bits does to the logits: the same text through the native decoder with each `kv_dtype`.

    python tests/bench/compare_kv_dtypes.py MODEL [--dtype bfloat16] [--tokens 1024] [--text FILE]

Every position's logits are compared with those of float32 KV in the same compute dtype: largest and mean difference, how often the likeliest token is
the same, and the Kullback-Leibler divergence in nats; and the perplexity of the text, which says whether any of it matters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from kvd.executor.attention.backend import AttentionRows
from kvd.executor.host_cores import compute_threads
from kvd.executor.input_batch import StepRows
from kvd.executor.kernels.cpu.native import BLOCK_SIZE_TOKENS
from kvd.executor.models.inspect import inspect_model
from kvd.executor.models.spec import fit_length
from kvd.executor.native_kv_pool import NativeKvPool
from kvd.executor.native_model import NativeModel, load_native_decoder
from kvd.text.model import load_text_model

CHUNK = 256
NONE = np.zeros(0, dtype=np.int64)
TEXT = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


def logits_of(model: NativeModel, token_ids: np.ndarray) -> torch.Tensor:
    """``[tokens, vocab]`` float32: the logits behind every position, the text computed in chunks."""
    table = np.arange(-(-len(token_ids) // BLOCK_SIZE_TOKENS), dtype=np.int32)[None]
    parts = []
    for first in range(0, len(token_ids), CHUNK):
        chunk = token_ids[first : first + CHUNK]
        rows = AttentionRows(
            num_tokens=np.array([len(chunk)]),
            num_computed=np.array([first]),
            starts=np.array([0, len(chunk)]),
            positions=np.arange(first, first + len(chunk)),
            token_rows=np.zeros(len(chunk), dtype=np.int64),
            block_tables=table,
        )
        hidden = model.forward(StepRows(np.zeros(1, dtype=np.int64), rows, chunk, np.ones(1, dtype=bool), NONE))
        parts.append(hidden.logits(np.arange(len(chunk))).clone())
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--text", type=Path, default=TEXT)
    options = parser.parse_args()
    spec, _ = fit_length(inspect_model(options.model), 0)
    token_ids = np.asarray(load_text_model(str(options.model)).encode(options.text.read_text("utf-8"))[: options.tokens], dtype=np.int64)
    decoder = load_native_decoder(
        options.model,
        spec,
        dtype=getattr(torch, options.dtype),
        quantised=False,
        threads=compute_threads(0),
        max_model_len=len(token_ids) + CHUNK,
        max_step_tokens=CHUNK,
        progress=lambda _done, _total: None,
    )
    targets = torch.from_numpy(token_ids[1:])
    exact = torch.empty(0)
    print(f"{options.model.name}, computed in {options.dtype}, {len(token_ids)} tokens of {options.text.name}")
    print("kv_dtype  bytes/token  max |d|  mean |d|  same top  KL mean  KL max   perplexity")
    for kv_type in ("float32", "bfloat16", "int8"):
        pool = NativeKvPool(spec, -(-len(token_ids) // BLOCK_SIZE_TOKENS), kv_type)
        logits = logits_of(NativeModel(decoder, pool), token_ids)
        if kv_type == "float32":
            exact = logits
        difference = (logits - exact).abs()
        logs, exact_logs = (torch.log_softmax(x, dim=-1) for x in (logits, exact))
        divergence = (exact_logs.exp() * (exact_logs - logs)).sum(-1)
        same = float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
        perplexity = float(-logs[:-1].gather(1, targets[:, None]).mean()) if len(targets) else 0.0
        print(
            f"{kv_type:9} {pool.row_bytes // BLOCK_SIZE_TOKENS:11}  {float(difference.max()):7.3f}  {float(difference.mean()):8.4f}  {same:8.2%}"
            f"  {float(divergence.mean()):.5f}  {float(divergence.max()):.5f}  {np.exp(perplexity):.4f}"
        )


if __name__ == "__main__":
    main()
