"""Seeded schedules of the ranks of a consumer group over the product's own state machines.

A failure prints its seed and variant; `run_schedule(VARIANTS[name], seed)` replays it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.workers.fleet.window import SessionLimits
from support.simulation.checker import History
from support.simulation.ranks import RankPlay, RankWorld
from support.simulation.world import LEASE_S, Faults, Settings
from support.thorough import schedules

pytestmark = pytest.mark.long

KILLED = frozenset({"worker_killed", "fenced", "broker_lost"})
ONLY_RANKS = Faults(breaks=0, worker_kills=0, worker_stops=0, broker_kills=0, learner_kills=0)
BASE = Settings(
    seed=0,
    workers=3,
    batches=40,
    hostile_s=20.0,
    faults=ONLY_RANKS,
    limits=BrokerLimits(lease_s=LEASE_S, max_held_bytes=1 << 20),
    session=SessionLimits(window_batches=40),
)
GROUPS = replace(BASE, limits=replace(BASE.limits, consumer_groups={"record": "wait"}))


@dataclass(frozen=True)
class Variant:
    """A kind of world with ranks, and how many of its schedules run."""

    schedules: int
    play: RankPlay
    settings: Settings = BASE
    losses: frozenset[str] = frozenset()


ALL = replace(BASE, faults=Faults(breaks=6, broker_kills=2, learner_kills=2))
VARIANTS = {
    "shared": Variant(16, RankPlay()),
    "fixed": Variant(16, RankPlay(is_fixed=True)),
    "peace": Variant(8, RankPlay(world_size=4, kills=0, cuts=0)),
    "shared_and_late_commits": Variant(8, RankPlay(commit_lag=2, world_size=4)),
    "fixed_and_late_commits": Variant(8, RankPlay(commit_lag=3, is_fixed=True)),
    "rival_processes": Variant(16, RankPlay(rivals=4, cuts=8)),
    "rival_processes_of_fixed_ranks": Variant(8, RankPlay(rivals=4, cuts=8, is_fixed=True, commit_lag=1)),
    "shared_and_all_die": Variant(16, RankPlay(), ALL, KILLED),
    "fixed_and_all_die": Variant(16, RankPlay(is_fixed=True, from_position=True, commit_lag=1), ALL, KILLED),
    "large_rounds": Variant(8, RankPlay(world_size=2, most=4), ALL, KILLED),
    "by_hand": Variant(16, RankPlay(commit_lag=None, from_position=True), ALL, KILLED),
    "by_hand_and_fixed": Variant(16, RankPlay(commit_lag=None, from_position=True, is_fixed=True), ALL, KILLED),
    "rivals_of_rank_0": Variant(8, RankPlay(), replace(ALL, faults=replace(ALL.faults, rival_learners=2)), KILLED),
    "group": Variant(16, RankPlay(group="record"), replace(GROUPS, faults=replace(ALL.faults, reader_kills=3)), KILLED),
}


def run_schedule(variant: Variant, seed: int) -> list[str]:
    """Play one schedule and return what is wrong with its history."""
    settings, play = replace(variant.settings, seed=seed), variant.play
    history, groups = History(), {group: History() for group in variant.settings.limits.consumer_groups}
    world = RankWorld(settings, play, history, groups)
    progressed = world.run(240.0)
    problems = list(world.truth.problems)
    for group, its in {"train": history, **groups}.items():
        trained = world.checkpoints[group][1]
        if group == play.group:  # `Truth` has judged the order within each rank
            trained = sorted(set(trained) if play.commit_lag is not None else trained)
        # Without a position, a batch may be lost with its worker after a commit that died with rank 0.
        is_exact = group != play.group or play.from_position
        found = its.judge(trained, losses=set(variant.losses), one_learner=is_exact)
        problems += [f"group {group}: {problem}" for problem in found]
    if not progressed:
        problems.append("no progress: something is still unsettled long after the last fault")
    if world.truth.rounds < 6:
        problems.append(f"{world.truth.rounds} rounds")
    return problems


@pytest.mark.parametrize(("name", "seeds"), schedules({name: it.schedules for name, it in VARIANTS.items()}))
def test_each_batch_is_committed_by_one_rank_and_rounds_go_on(name: str, seeds: range) -> None:
    for seed in seeds:
        problems = run_schedule(VARIANTS[name], seed)
        assert not problems, f"variant {name!r}, seed {seed}: {problems[:3]}"


@pytest.mark.parametrize(("name", "seed"), [("group", 260)])
def test_schedules_that_once_failed(name: str, seed: int) -> None:
    """260: the core's books of a dead worker had fewer batches than the reader, and the broker raised at its HELLO."""
    assert run_schedule(VARIANTS[name], seed) == []
