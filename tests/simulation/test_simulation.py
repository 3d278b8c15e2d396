"""Thousands of seeded schedules of loss, delay, repetition, crash and restart over the product's own state machines.

A failure prints its seed and variant; `run_schedule(VARIANTS[name], seed)` replays it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.schemas.accounts.ledger import HeldBatch, LedgerRow, Settled, WorkerTotals
from headrace.workers.fleet.window import SessionLimits
from support.simulation.checker import History
from support.simulation.world import FRAGMENT_STEPS, LEASE_S, Faults, Settings, World
from support.thorough import schedules

pytestmark = pytest.mark.long

KILLED = frozenset({"worker_killed", "fenced", "broker_lost"})


@dataclass(frozen=True)
class Variant:
    """A kind of world, how many of its schedules run, and the only reasons for which it may lose a batch."""

    schedules: int
    settings: Settings
    losses: frozenset[str] = KILLED
    one_learner: bool = True


def _limits(**changes: object) -> BrokerLimits:
    return replace(BrokerLimits(lease_s=LEASE_S, max_held_bytes=1 << 20), **changes)  # type: ignore[arg-type]


BASE = Settings(seed=0)
OF_GROUPS = {"record": frozenset[str](), "watch": frozenset({"overflow", "before_group"})}
"""Further reasons for which a consumer group may lose a batch. Workers wait for the group `record`."""
GROUPS = replace(BASE, limits=_limits(consumer_groups={"record": "wait", "watch": "drop"}))
MANY = Faults(worker_kills=14, broker_kills=4, learner_kills=2, whole_kills=1, redis_stops=2)
ALONE = Faults(breaks=0, worker_kills=0, worker_stops=0, broker_kills=0, learner_kills=0, reader_kills=4)
VARIANTS = {
    "groups": Variant(300, replace(GROUPS, faults=Faults(reader_kills=3, redis_stops=1))),
    "groups_without_redis": Variant(150, replace(GROUPS, faults=Faults(reader_kills=3, redis_absent=True))),
    "groups_all_at_once": Variant(150, replace(GROUPS, faults=Faults(whole_kills=2, reader_kills=2))),
    "groups_lossy": Variant(100, replace(GROUPS, faults=Faults(drop=0.05, repeat=0.05, reader_kills=2))),
    "readers_only": Variant(100, replace(GROUPS, faults=ALONE), frozenset()),
    "groups_of_tight_memory": Variant(
        100, replace(GROUPS, faults=ALONE, limits=replace(GROUPS.limits, max_held_bytes=300)), frozenset()
    ),
    "crashes": Variant(800, BASE),
    "peace": Variant(100, replace(BASE, faults=Faults(0, 0, 0, 0, 0, 0, 0)), losses=frozenset()),
    "broker_and_learner_only": Variant(
        300, replace(BASE, faults=Faults(worker_kills=0, worker_stops=0, broker_kills=4, learner_kills=4)), frozenset()
    ),
    "lossy_and_repeating": Variant(250, replace(BASE, faults=Faults(drop=0.05, repeat=0.05))),
    "all_at_once": Variant(300, replace(BASE, faults=Faults(whole_kills=2, redis_stops=2))),
    "many_lives": Variant(60, replace(BASE, hostile_s=24.0, batches=40, faults=MANY)),
    "no_redis": Variant(200, replace(BASE, faults=Faults(redis_absent=True))),
    "no_state_at_all": Variant(200, replace(BASE, faults=Faults(redis_absent=True, keep_state_file=False))),
    "rival_learners": Variant(200, replace(BASE, faults=Faults(rival_learners=2)), one_learner=False),
    "tight_memory": Variant(200, replace(BASE, limits=_limits(max_held_bytes=300))),
    "window_follows": Variant(200, replace(BASE, tells_size=True)),
    "synchronous": Variant(200, replace(BASE, round_steps=20)),
    "synchronous_in_peace": Variant(
        50, replace(BASE, workers=3, round_steps=20, faults=Faults(0, 0, 0, 0, 0, 0, 0)), losses=frozenset()
    ),
    "drop_oldest": Variant(
        200, replace(BASE, limits=_limits(max_held_bytes=300, overflow="drop_oldest")), KILLED | {"overflow"}
    ),
    "few_batches": Variant(100, replace(BASE, limits=_limits(max_held_batches=3))),
    "drop_oldest_of_few": Variant(
        100, replace(BASE, limits=_limits(max_held_batches=3, overflow="drop_oldest")), KILLED | {"overflow"}
    ),
    "stale": Variant(150, replace(BASE, limits=_limits(max_staleness=1), publishes=True), KILLED | {"stale"}),
    "stale_in_rounds": Variant(100, replace(BASE, limits=_limits(max_staleness=1), round_steps=20), KILLED | {"stale"}),
    "pairs_die": Variant(200, replace(BASE, faults=Faults(joint_kills=3, redis_stops=1))),
    "pairs_die_without_redis": Variant(
        100, replace(BASE, faults=Faults(joint_kills=3, redis_absent=True, keep_state_file=False))
    ),
    "pairs_die_and_batches_are_stale": Variant(
        100,
        replace(BASE, limits=_limits(max_staleness=1), publishes=True, faults=Faults(joint_kills=3)),
        KILLED | {"stale"},
    ),
}


def run_schedule(variant: Variant, seed: int) -> list[str]:
    """Play one schedule and return what is wrong with its history."""
    history, groups = History(), {group: History() for group in variant.settings.limits.consumer_groups}
    world = World(replace(variant.settings, seed=seed), history, groups)
    progressed = world.run()
    problems = history.judge(world.checkpoint[1], losses=set(variant.losses), one_learner=variant.one_learner)
    for group, its in groups.items():
        found = its.judge(world.checkpoints[group][1], losses=set(variant.losses | OF_GROUPS[group]))
        problems += [f"group {group}: {problem}" for problem in found]
    if not progressed:
        problems.append("no progress: something is still unsettled long after the last fault")
    return problems


def test_synchronous_batches_arrive_in_order_of_round_slot_and_number() -> None:
    for seed in range(20):
        endless = replace(VARIANTS["synchronous_in_peace"].settings, seed=seed, batches=10_000)
        world = World(endless, History())
        world.run(deadline_s=40.0)
        order = [(world.versions[(slot, life, seq)], slot, seq) for slot, life, seq, *_ in world.checkpoint[1]]
        assert order == sorted(order), seed
        assert order[-1][0] > (1, 5)


def test_at_least_two_thousand_schedules_run() -> None:
    assert sum(variant.schedules for variant in VARIANTS.values()) >= 2000


@pytest.mark.parametrize(("name", "seeds"), schedules({name: it.schedules for name, it in VARIANTS.items()}))
def test_every_promise_holds_under_every_schedule(name: str, seeds: range) -> None:
    variant = VARIANTS[name]
    for seed in seeds:
        problems = run_schedule(variant, seed)
        assert not problems, f"variant {name!r}, seed {seed}: {problems[:3]}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kills", [0, 2])
def test_a_fleet_stops_within_one_fragment_of_each_worker(kills: int) -> None:
    """This holds despite lost messages. Up to a window of steps of a killed worker may not be counted yet."""
    window, most = 4, 150
    faults = Faults(drop=0.05, repeat=0.05, worker_kills=kills, worker_stops=0, broker_kills=0)
    session = SessionLimits(window, window_env_steps=(window + 1) * FRAGMENT_STEPS)
    settings = replace(
        BASE, workers=3, batches=1000, faults=faults, session=session, limits=_limits(max_env_steps=most)
    )
    for seed in range(40):
        world = World(replace(settings, seed=seed), History())
        world.run(60.0)
        steps = sum(worker.recorder.totals.stepped for worker in world.workers)
        killed = len(world.workers) - settings.workers
        over = settings.workers * FRAGMENT_STEPS + killed * window * FRAGMENT_STEPS
        assert most <= steps < most + over, f"seed {seed}: {steps} steps with {killed} workers killed"


def test_a_schedule_replays_exactly() -> None:
    first, second = History(), History()
    for history in (first, second):
        World(replace(BASE, seed=7), history).run()
    assert first.rows == second.rows
    assert first.batches == second.batches


def _good_history() -> tuple[History, list[tuple[int, ...]]]:
    history = History()
    for seq in (1, 2, 3):
        history.cut(0, 1, HeldBatch(seq=seq, steps=10, chunks=2))
    totals = WorkerTotals(seq=3, stepped=30, shipped=30, shipped_chunks=6)
    settled = Settled(seq=3, committed=(30, 6))
    history.row(LedgerRow(slot=0, incarnation=1, totals=totals, accepted=(30, 6), held=(0, 0), settled=settled))
    return history, [(0, 1, 1, 10, 2), (0, 1, 2, 10, 2), (0, 1, 3, 10, 2)]


def test_the_checker_accepts_a_good_history() -> None:
    history, trained = _good_history()
    assert history.judge(trained, losses=set()) == []


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda trained: trained.append(trained[-1]), "duplicate"),
        (lambda trained: trained.pop(1), "stand as committed"),
        (lambda trained: trained.insert(0, trained.pop()), "out of order"),
        (lambda trained: trained.append((0, 1, 4, 10, 2)), "never cut"),
        (lambda trained: trained.__setitem__(0, (0, 1, 1, 9, 2)), "never cut"),
    ],
)
def test_the_checker_catches_a_bad_history(damage, word) -> None:  # type: ignore[no-untyped-def]
    history, trained = _good_history()
    damage(trained)
    assert any(word in problem for problem in history.judge(trained, losses=set()))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"settled": Settled(seq=3, committed=(20, 4), dropped={"overflow": (10, 2)})}, "nothing in this schedule"),
        ({"settled": Settled(seq=3, committed=(20, 4))}, "accepted"),
        ({"totals": WorkerTotals(seq=3, stepped=31, shipped=30, shipped_chunks=6)}, "stepped"),
        ({"lost": {"worker_killed": (10, 2)}}, "shipped"),
        ({"held": (10, 2)}, "held"),
    ],
)
def test_the_checker_catches_bad_books(change, word) -> None:  # type: ignore[no-untyped-def]
    history, trained = _good_history()
    history.row(history.rows[(0, 1)].model_copy(update=change))
    assert any(word in problem for problem in history.judge(trained, losses=set()))


def test_the_checker_catches_a_broken_broker() -> None:
    """A broker that settles what the learner never committed must fail some schedule: the suite can fail."""

    def run(seed: int) -> list[str]:
        history = History()
        world = World(replace(BASE, seed=seed), history)
        assert world.broker is not None
        original = world.broker.receive_batch

        def forgetful(peer, header, frames, nbytes, now):  # type: ignore[no-untyped-def]
            original(peer, header, frames, nbytes, now)
            for source in world.broker.sources.values() if world.broker else ():
                if len(source.held) > 2:
                    seq = source.settled.seq + 1
                    source.learn_settled(source.settled.add(source.held[seq].count, {}))

        world.broker.receive_batch = forgetful  # type: ignore[method-assign]
        world.run()
        return history.judge(world.checkpoint[1], losses=set(KILLED))

    assert any(run(seed) for seed in range(20))
