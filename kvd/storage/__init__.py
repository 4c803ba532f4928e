"""Checkpoints, recovery, recipes and store generations in LMDB. Watches cache events; the cache and the scheduler know nothing of it."""
