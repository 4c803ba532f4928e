"""Makes the committed SmolLM2 oracle: token ids of the prompts, and transformers' greedy float32 continuations of them.

    python tests/oracle/make_reference.py MODEL.gguf [--ids-only]

Rewrites ``token_ids`` in tests/data/smollm2_prompts.jsonl from each line's text or messages, then computes
tests/data/smollm2_reference.jsonl in batches of prompts of similar length, on one thread (ten minutes on a busy machine), and
tests/data/smollm2_reference.meta.json.
The formats are described in tests/data/README.md. Nothing of kvd is used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
import transformers
from tokenizers import pre_tokenizers

DATA = Path(__file__).parent.parent / "data"
sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from reference_models import batched_greedy  # noqa: E402

NUM_TOKENS = 64
BATCH_SIZE = 24
_ESCAPED = {character: f"\\u{character:04x}" for character in (0xA0, 0xAD, 0x200B, 0x2028, 0x2029, 0x202C, 0x202E)}
"""Written as escapes: invisible, or taken for line ends by some readers."""


def load_tokenizer(path: Path) -> Any:
    """transformers' tokenizer of the file, with SmolLM's pre-tokenizer (digits one by one, then GPT-2's), which its import loses."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    tokenizer.chat_template = gguf.GGUFReader(path).fields["tokenizer.chat_template"].contents()
    return tokenizer


def token_ids(tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    if "text" in prompt:
        return tokenizer.backend_tokenizer.encode(prompt["text"], add_special_tokens=False).ids
    rendered = tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
    return tokenizer.backend_tokenizer.encode(rendered, add_special_tokens=False).ids


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    path.write_text(text.translate(_ESCAPED), encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ids-only", action="store_true")
    arguments = parser.parse_args()
    path = arguments.model.resolve()
    torch.set_num_threads(1)
    prompts_file = DATA / "smollm2_prompts.jsonl"
    prompts = [json.loads(line) for line in prompts_file.read_text(encoding="utf-8").split("\n") if line]
    tokenizer = load_tokenizer(path)
    prompts = [{**prompt, "token_ids": token_ids(tokenizer, prompt)} for prompt in prompts]
    write_lines(prompts_file, prompts)
    if arguments.ids_only:
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    references: dict[str, dict[str, Any]] = {}
    by_length = sorted(prompts, key=lambda prompt: len(prompt["token_ids"]))
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = by_length[start : start + BATCH_SIZE]
        for prompt, continuation in zip(batch, batched_greedy(model, [entry["token_ids"] for entry in batch], NUM_TOKENS), strict=True):
            margins = [float(f"{margin:.4g}") for margin in continuation.margins]
            references[prompt["id"]] = {"id": prompt["id"], "token_ids": continuation.token_ids, "margins": margins}
        print(
            f"{len(references)}/{len(prompts)}, prompts of {len(batch[0]['token_ids'])} to {len(batch[-1]['token_ids'])} tokens", flush=True
        )
    write_lines(DATA / "smollm2_reference.jsonl", [references[prompt["id"]] for prompt in prompts])
    versions = {module.__name__: module.__version__ for module in (transformers, tokenizers, torch)}
    meta = {
        "weights": path.name,
        "weights_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "dtype": "float32",
        "attention": model.config._attn_implementation,
        "rope_theta": model.config.rope_parameters["rope_theta"],
        "num_tokens": NUM_TOKENS,
        "versions": versions,
    }
    (DATA / "smollm2_reference.meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
