"""One config-driven decoder and the readers of its weights. Never sees a batch of requests."""
