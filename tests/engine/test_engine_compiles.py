"""Constraints that are still being compiled when the daemon is to end."""

from __future__ import annotations

from engine_world import World

from kvd.commands import Drain
from kvd.engine.loop import LoopEnd
from kvd.types import Constraint, ErrorCode

PROMPT = list(b"It was a dark and stormy night; the rain fell in torrents")


class SlowCompiler:
    """Implements the scheduler's ``ConstraintCompiler`` as far as it is asked: the constraint "wrong" is refused at once when ``ends`` is set, the others never end."""

    def __init__(self):
        self.ends = False
        self.num_outgrown = 0
        self.tickets = {}

    def begin(self, constraint):
        self.tickets[len(self.tickets)] = constraint.source[0]
        return len(self.tickets) - 1

    def poll(self, ticket):
        if not (self.ends and self.tickets[ticket] == "wrong"):
            return None
        del self.tickets[ticket]
        return ErrorCode.BAD_REQUEST, "it is wrong"

    def cancel(self, ticket):
        del self.tickets[ticket]

    def stats(self):
        return {}


def test_a_drain_waits_for_a_compile_a_second_at_most():
    def life(world):
        yield from world.ready()
        world.scheduler._constraints._compiler = compiler
        slow = world.submit(PROMPT, max_tokens=5, constraint=Constraint("choice", ("slow",)))
        quick = world.submit(PROMPT, max_tokens=5, constraint=Constraint("choice", ("wrong",)))
        yield from world.until(lambda: len(compiler.tickets) == 2)
        world.began_s = world.clock.now_s
        world.op(Drain, 600.0)
        compiler.ends = True
        yield from world.over(slow, quick)
        assert world.client.requests[slow].code == "draining"
        assert world.client.requests[quick].code == "bad_request"
        while True:
            yield

    compiler = SlowCompiler()
    world = World()
    assert world.run(life(world)) is LoopEnd.DRAINED
    assert world.clock.now_s - world.began_s < 2.0
    assert not compiler.tickets
