"""Attention over the paged pool behind one backend protocol; the reference is SDPA over gathered pages."""
