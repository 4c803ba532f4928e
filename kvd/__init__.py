"""kvd: an inference daemon whose KV cache survives restarts. The rooms are described in docs/architecture.md."""
