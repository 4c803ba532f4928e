"""From logits to token ids: penalties, truncation, counter-based noise, log-probabilities. Holds no generator state."""
