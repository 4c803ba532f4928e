"""Speculative decoding, as far as it needs no model: what is proposed, how likely it is to be accepted, what it costs. Knows token ids and numbers, never a request or a tensor."""
