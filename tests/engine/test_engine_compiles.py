"""Constraints that are still being compiled when the daemon is to end, and steps that wait for their masks when it fails."""

from __future__ import annotations

import pytest
from engine_world import World

from kvd.commands import Drain
from kvd.engine.loop import LoopEnd
from kvd.executor.fake import VOCAB_SIZE
from kvd.executor.worker import ExecutorThread
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


class Anything:
    """Implements ``CompiledConstraint`` and ``ConstraintState``: whatever comes is allowed."""

    problem = ""
    has_strayed = is_over = is_complete = False

    def start(self):
        return self

    def advance(self, token_id):
        pass


class OpenCompiler:
    """Implements the scheduler's ``ConstraintCompiler``: everything is allowed, but the masks numbered ``breaks_at`` can't be had."""

    def __init__(self, breaks_at=None):
        self.breaks_at = breaks_at
        self.num_outgrown = self.num_masks = 0

    def begin(self, constraint):
        return 0

    def poll(self, ticket):
        return Anything()

    def masks(self, states, drafts):
        self.num_masks += 1
        if self.num_masks == self.breaks_at:
            raise RuntimeError("injected: no masks")
        return bytearray(b"\xff" * (4 * -(-VOCAB_SIZE // 32) * len(states)))

    def stats(self):
        return {}


def late_world(compiler, make_executor):
    world = World(max_steps_in_flight=2, make_executor=make_executor)
    world.scheduler._constraints._compiler = compiler
    world.scheduler._constraints._may_be_late = True
    return world


def ask(world):
    yield from world.ready()
    yield from world.over(world.submit(PROMPT, max_tokens=50, constraint=Constraint("choice", ("any",))))


def test_an_engine_that_raises_leaves_no_executor_waiting_for_masks():
    executors = []
    world = late_world(OpenCompiler(breaks_at=3), lambda runner: executors.append(ExecutorThread(runner)) or executors[0])
    with pytest.raises(RuntimeError, match="no masks"):
        world.run(ask(world))
    assert executors[0].close(10.0)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_an_executor_that_raises_before_or_in_a_step_that_waits_for_masks_ends(fails_at):
    class Failing(ExecutorThread):
        is_dead = False

        def _execute(self, step):
            output = super()._execute(step)
            if step.step == fails_at:
                self.is_dead = True
                raise RuntimeError("injected: the step fails")
            return output

    executors = []
    world = late_world(OpenCompiler(), lambda runner: executors.append(Failing(runner)) or executors[0])
    assert world.run(ask(world)) is LoopEnd.ENGINE_ERROR
    (request,) = world.client.requests.values()
    assert request.code == "engine_error"
    assert executors[0].close(10.0)
