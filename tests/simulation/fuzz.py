"""Fuzzing of the broker's core with mutated messages of strangers, beside honest peers whose books must stay exact.

Run it for N minutes, from a seed, with `python tests/simulation/fuzz.py N [SEED]`, or by `make fuzz MINUTES=N`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace.broker.batches.limits import BrokerLimits
from headrace.workers.fleet.window import SessionLimits
from support.simulation.checker import History
from support.simulation.world import LEASE_S, Faults, Settings, World

LOSSES = {"worker_killed", "fenced", "broker_lost", "overflow", "stale"}


def settings_of(seed: int) -> Settings:
    """The world of one schedule: every third has a broker that loses its state.

    Some drop the oldest or the stale, or have rounds.
    """
    tight, stales = seed % 5 == 1, seed % 6 == 5
    limits = BrokerLimits(
        lease_s=LEASE_S,
        max_held_bytes=300 if tight else 1 << 20,
        overflow="drop_oldest" if tight else "block",
        max_staleness=1 if stales else None,
    )
    faults = Faults(
        drop=0.02 * (seed % 4 == 2),
        repeat=0.05 * (seed % 4 == 3),
        worker_kills=8 if seed % 2 else 1,  # so that old lives fold
        worker_stops=0,
        keep_state_file=seed % 3 != 0,
    )
    round_steps = 20 if seed % 7 == 6 else 0
    session = SessionLimits(window_batches=4)
    return Settings(
        seed=seed,
        faults=faults,
        limits=limits,
        session=session,
        round_steps=round_steps,
        publishes=stales,
        strangers=True,
    )


def play(seed: int) -> tuple[list[str], Counter[str]]:
    """Play one schedule. Return what is wrong with the honest peers' history, and what strangers said."""
    history = History()
    world = World(settings_of(seed), history)
    progressed = world.run()
    honest = [batch for batch in world.checkpoint[1] if batch[0] < world.settings.workers]
    problems = history.judge(honest, losses=LOSSES)
    assert world.strangers is not None
    return problems + ([] if progressed else ["no progress"]), world.strangers.said


def play_honestly(seed: int) -> Counter[str]:
    """Play one schedule, and return what strangers said.

    Raises `AssertionError` with the seed when honest peers suffered. An exception that leaves the core goes on to the
    caller, with a note of the seed.
    """
    try:
        problems, said = play(seed)
    except Exception as error:
        error.add_note(f"seed {seed}: python tests/simulation/fuzz.py 0 {seed} plays it")
        raise
    assert not problems, f"seed {seed}: {problems[:3]}"
    return said


def fuzz(seconds: float, seed: int = 0) -> tuple[int, Counter[str]]:
    """Play schedules from `seed` on until the time is over, at least one. Return how many, and what strangers said."""
    said: Counter[str] = Counter()
    schedules, end = 0, time.monotonic() + seconds
    while not schedules or time.monotonic() < end:
        said += play_honestly(seed + schedules)
        schedules += 1
    return schedules, said


def main(minutes: float, seed: int) -> None:
    """Fuzz, and print what was tried."""
    logging.disable(logging.CRITICAL)
    schedules, said = fuzz(60.0 * minutes, seed)
    lines = [f"{schedules:,} schedules from seed {seed}, {sum(said.values()):,} messages; honest books exact in all"]
    lines += [f"{count:12,}  {kind}" for kind, count in sorted(said.items())]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
