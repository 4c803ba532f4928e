"""A simulation with room for eight requests, and prompts for it: what plain tests begin with and take from."""

from __future__ import annotations

from simulation import Simulation


def make(**options):
    defaults = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "max_tokens_per_step": 32, "max_running": 8, "max_waiting": 16}
    return Simulation(**(defaults | options))


def prompt(num_tokens, salt=0):
    return [(7 * index + salt) % 2 if index > 3 else (salt >> index) & 1 for index in range(num_tokens)]


def tokens_of(step):
    """(row, number of tokens) of a step, in the order of the columns."""
    return [(row.row, row.num_tokens) for row in step.started] + list(zip(step.continued.rows, step.continued.num_tokens, strict=True))
