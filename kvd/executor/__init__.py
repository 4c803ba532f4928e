"""The only room that knows tensors: input batch, paged KV pools, model, attention, sampling. Never sees a schedule, a tree or a message."""
