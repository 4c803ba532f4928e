"""Random lives: what clients and disk may do to an engine, and the engines they do it to, all drawn from one generator."""

from __future__ import annotations

from engine_client import POISON
from engine_world import World, recipe

from kvd.commands import Abort, CheckpointNow, Drain, FinishChoice, Grant, Query, Submit, Unpin
from kvd.types import SamplingParams, pack_tokens

NAMES = ("system", "tools", "memory")


def prefix(rng, most_blocks):
    """Blocks out of a few, so that prompts share; now and then one that poisons."""
    tokens = []
    for _ in range(rng.randint(0, most_blocks)):
        letter = rng.choices((97, 98, POISON), (60, 38, 2))[0]
        tokens += [letter] * 16
    return tokens


def prompt(rng, most_blocks):
    tail = [rng.choices((97, 98, POISON), (50, 48, 2))[0] for _ in range(rng.randint(0, 15))]
    return prefix(rng, most_blocks) + tail or [97]


class Life:
    """What clients and disk do in a world, drawn from ``rng``."""

    def __init__(self, world, rng, *, num_rounds, storage_error_rate, is_stuck=False):
        self.world, self.rng = world, rng
        self.num_rounds, self.error_rate, self.is_stuck = num_rounds, storage_error_rate, is_stuck
        self.most_blocks = max(1, min(5, world.cache.num_blocks // 3))
        self.busy = rng.choice((0.1, 0.25, 0.5))
        self.few_credits = rng.random() < 0.5

    def __iter__(self):
        rng = self.rng
        while self.world.round < self.num_rounds:
            while rng.random() < self.busy:
                self.client_acts()
            self.disk_acts()
            yield
        if rng.random() < 0.5:
            self.world.op(Drain, rng.choice((0.0, 2.0, 20.0)))
        else:
            self.world.request_drain()
        while True:
            if rng.random() < 0.1:
                self.client_acts()
            self.disk_acts()
            yield

    def client_acts(self):
        world, rng = self.world, self.rng
        some = rng.choice(list(world.client.requests)[-8:]) if world.client.requests else None
        match rng.choices(("submit", "abort", "grant", "finish", "pin", "unpin", "query", "checkpoint"), (30, 8, 30, 6, 7, 4, 3, 2))[0]:
            case "submit":
                self.submit()
            case "abort" if some:
                world.send(Abort(some))
            case "grant" if some:
                world.send(Grant(some, rng.randint(1, 12)))
            case "finish" if some:
                world.send(FinishChoice(some, rng.randrange(world.client.requests[some].command.num_choices)))
            case "pin":
                world.pin(rng.choice(NAMES), prompt(rng, self.most_blocks), salt=rng.choice((b"", b"", b"tenant")))
            case "unpin":
                world.op(Unpin, rng.choice(NAMES))
            case "query":
                world.op(Query, rng.choice(("status", "stats", "prefixes")))
            case "checkpoint":
                world.op(CheckpointNow)

    def submit(self):
        rng = self.rng
        tokens = prompt(rng, self.most_blocks)
        for _ in range(rng.choice((1, 1, 3))):  # at once, and perhaps the same: they share what nobody has computed yet
            tokens = rng.choice((tokens, prompt(rng, self.most_blocks)))
            self.world.submit(
                tokens,
                max_tokens=rng.choice((1, 3, 18, 40)),
                num_choices=rng.choice((1, 1, 1, 2, 3)),
                sampling=SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(3)),
                stop_token_ids=rng.choice(((), (101,))),
                credit_tokens=rng.choice((0, 1, 5)) if self.few_credits else 1000,
                tenant_salt=rng.choice((b"", b"", b"tenant")),
            )

    def disk_acts(self):
        world, rng = self.world, self.rng
        store, book = world.store, world.book
        error = "injected: no disk" if rng.random() < self.error_rate else ""
        if not self.is_stuck and book.pending and rng.random() < 0.3:
            book.settle(rng.randint(1, len(book.pending)), error)
        if not self.is_stuck and rng.random() < 0.3:
            store.settle(error)
        if store.blocks and len(store.leases) < 3 and rng.random() < 0.2:
            store.lease(rng.choice(list(store.blocks)))
        if rng.random() < 0.3:
            store.end_lease()
        if world.disk is not None and not self.is_stuck and rng.random() < 0.4:
            world.disk.fail() if error else world.disk.read(rng.randint(1, 3))
        store.idle_delay = rng.choice((0.002, 0.1, 5.0))


def make_world(rng, **options):
    num_blocks = rng.choice((6, 10, 16, 64))
    recipes = [recipe(name, prompt(rng, 3), priority=rng.randint(0, 99)) for name in NAMES if rng.random() < 0.4]
    return World(
        num_blocks=num_blocks,
        max_steps_in_flight=rng.choice((1, 2)),
        max_pinned_fraction=rng.choice((0.2, 0.5)),
        max_model_len=rng.choice((60, 120)),
        is_lazy=rng.random() < 0.5,
        drain_timeout_s=rng.choice((1.0, 10.0)),
        recipes=recipes,
        max_running=rng.choice((3, 4, 8)),
        max_waiting=rng.choice((4, 50)),
        max_tokens_per_step=rng.choice((5, 16, 37, 200)),
        max_choices=3,
        stall_timeout_s=rng.choice((0.5, 5.0)),
        max_stalled=rng.choice((2, 20)),
        disk=rng.random() < 0.7,
        **options,
    )


def start_work(rng, world):
    now_s = world.clock.now_s
    recompute = [
        Submit(
            request_id=b"again%11d" % index, token_ids=pack_tokens(prompt(rng, 3)), sampling=SamplingParams(temperature=0.0), max_tokens=1
        )
        for index in range(rng.randint(0, 3))
    ]
    return {
        "recompute": recompute,
        "pins_deadline_s": now_s + rng.choice((0.0, 0.05, 5.0)),
        "recompute_deadline_s": now_s + rng.choice((0.0, 0.05, 5.0)),
    }
