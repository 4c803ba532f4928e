"""transformers' own generate over kvd's pool: ``python transformers_cache.py MODEL``, where MODEL is a chat model that ``from_pretrained`` takes.

The second question computes only its own words.
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvd.integrations.transformers import KvdPool

RULES = "You answer questions about a museum in one short sentence. It opens at ten, closes at six, and is closed on Mondays. "
QUESTIONS = ("When does it open?", "When does it close?", "On which day is it closed?")


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
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
