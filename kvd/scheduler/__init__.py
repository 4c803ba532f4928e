"""Decides how many tokens of which request run in a step, and owns all mutable request state. Never sees a tensor, a socket, a disk or text."""
