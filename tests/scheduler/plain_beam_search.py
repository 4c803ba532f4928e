"""Beam search for one prompt in the words of transformers' ``_beam_search``: everything padded to the width, what is not there at minus 1e9."""

from __future__ import annotations

NEVER = -1.0e9


def plain_beam_search(
    logprobs_of, *, width, stop_ids, max_tokens, min_tokens=0, length_penalty=1.0, early_stopping=False, num_returned=None
):
    """``logprobs_of(tokens)`` gives a list over the vocabulary. Returns (tokens, score) pairs, the best first."""
    num_kept = max(2, 1 + len(stop_ids)) * width
    running = [((), 0.0)] + [((), NEVER)] * (width - 1)
    finished = [((), NEVER, False)] * width
    unsatisfied = True
    length = 0
    while True:
        flat = []
        for tokens, total in running:
            row = list(logprobs_of(tokens))
            if length < min_tokens:
                for stop in stop_ids:
                    row[stop] = float("-inf")
            flat += [(total + logprob, (*tokens, token)) for token, logprob in enumerate(row)]
        top = sorted(flat, key=lambda entry: -entry[0])[:num_kept]
        hits = [tokens[-1] in stop_ids or length + 1 >= max_tokens for _, tokens in top]
        going_on = [(total + NEVER * hit, tokens) for (total, tokens), hit in zip(top, hits, strict=True)]
        running = [(tokens, total) for total, tokens in sorted(going_on, key=lambda entry: -entry[0])[:width]]
        is_full = all(done for _, _, done in finished)
        merged = list(finished)
        for place, ((total, tokens), hit) in enumerate(zip(top, hits, strict=True)):
            just_finished = hit and place < width
            score = total / (length + 1) ** length_penalty
            score += NEVER * (is_full and early_stopping is True) + NEVER * (not unsatisfied) + NEVER * (not just_finished)
            merged.append((tokens, score, just_finished))
        finished = sorted(merged, key=lambda entry: -entry[1])[:width]
        length += 1
        hypothetical = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        best = running[0][1] / hypothetical**length_penalty
        worst = min(score for _, score, _ in finished)
        unsatisfied = unsatisfied and any(best > (worst if done else NEVER) for _, _, done in finished)
        exists_open = not (all(done for _, _, done in finished) and early_stopping is True)
        if not (unsatisfied and exists_open and not all(hits)):
            break
    return [(tokens, score) for tokens, score, _ in finished[: num_returned or width]]
