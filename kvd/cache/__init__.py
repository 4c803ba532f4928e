"""Decides which block holds which tokens and who uses it. Speaks token ids and block ids; never sees a request, a batch, a tensor or a disk."""
