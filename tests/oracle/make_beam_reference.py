"""Makes the committed oracle of SmolLM2's beams: sequences and scores of transformers' ``generate(num_beams=…)`` in float32.

    python tests/oracle/make_beam_reference.py MODEL.gguf

Reads the token ids of tests/data/smollm2_prompts.jsonl and writes tests/data/smollm2_beams.jsonl, on one thread (some minutes). The format is described
in tests/data/README.md. Nothing of kvd is used.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers

DATA = Path(__file__).parent.parent / "data"
PROMPTS = ("prose-03", "ask-06", "code-12", "world-14", "digits-05", "odd-08", "chat-08", "long-13", "chat-16", "ask-19")
SETTINGS = ((0.0, False), (1.0, False), (2.0, True), (1.0, "never"))
NUM_TOKENS = 24
EOS_TOKEN_ID = 2
FULL_STOP = 30
"""The ids of the end of a turn and of a full stop: beams of a chat or a sentence end within the tokens that are looked at."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    path = parser.parse_args().model.resolve()
    torch.set_num_threads(1)
    lines = (DATA / "smollm2_prompts.jsonl").read_text(encoding="utf-8").split("\n")
    prompts = {entry["id"]: entry["token_ids"] for entry in map(json.loads, filter(None, lines))}
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with (DATA / "smollm2_beams.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for number, name in enumerate(PROMPTS):
            for width in (2, 4, 8):
                length_penalty, early_stopping = SETTINGS[number % len(SETTINGS)]
                stop_ids = [EOS_TOKEN_ID, FULL_STOP] if number % 2 else [EOS_TOKEN_ID]
                line = search(model, prompts[name], width, length_penalty, early_stopping, stop_ids)
                file.write(json.dumps({"id": name, **line}, separators=(",", ":")) + "\n")
                file.flush()
                print(name, width, [len(sequence) for sequence in line["sequences"]], flush=True)


@torch.inference_mode()
def search(model, prompt, width, length_penalty, early_stopping, stop_ids):
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=stop_ids,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    result = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64))
    sequences = []
    for row in result.sequences[:, len(prompt) :].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in stop_ids), len(row))
        sequences.append(row[:end])
    return {
        "width": width,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "stop_token_ids": stop_ids,
        "sequences": sequences,
        "scores": [float(f"{score:.7g}") for score in result.sequences_scores.tolist()],
    }


if __name__ == "__main__":
    main()
