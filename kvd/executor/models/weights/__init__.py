"""Readers of weights: safetensors directories and GGUF files. Never computes."""
