"""What is wrong with a constraint, or with constraints on this daemon."""


class GrammarError(Exception):
    """A constraint can't be compiled; the message is for its author."""
