"""transformers' own generate over kvd's pool: ``python transformers_cache.py MODEL``.

MODEL is a chat model: a directory or hub name that ``from_pretrained`` takes, or a GGUF file as ``kvd pull`` prints it (needs transformers, torch, and for GGUF the
packages gguf and accelerate). The second question computes only its own words.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvd.integrations.transformers import KvdPool

RULES = "You answer questions about a museum in one short sentence. It opens at ten, closes at six, and is closed on Mondays. "
QUESTIONS = ("When does it open?", "When does it close?", "On which day is it closed?")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python transformers_cache.py MODEL, a directory for from_pretrained or a GGUF file: $(kvd pull smollm2)")
    path, file = Path(sys.argv[1]), {}
    if path.suffix == ".gguf":
        path, file = path.parent, {"gguf_file": path.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **file)
        tokenizer = AutoTokenizer.from_pretrained(path, **file)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"transformers can't load {sys.argv[1]}: {error}")
    pool = KvdPool(model, kv_memory=64 << 20)
    for question in QUESTIONS:
        chat = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        before = pool.stats()["hit_tokens"]
        answer = pool.generate(prompt, max_new_tokens=24, do_sample=False)
        text = tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True)
        print(f"{question} {text.strip()!r}  [{pool.stats()['hit_tokens'] - before} of {prompt.shape[1]} tokens were there]")


if __name__ == "__main__":
    main()
