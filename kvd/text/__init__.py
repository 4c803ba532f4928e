"""Text at the edge: tokenizer, chat template, incremental detokenizer, stop strings. Never sees a block, a socket or a step."""
