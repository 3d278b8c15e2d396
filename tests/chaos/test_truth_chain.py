"""The final totals of a dead worker stand in its recorder until Redis has them, whatever is killed in between."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.recorder import Reading, read_recorder
from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos

SETTINGS = ("learner.epochs=1", "broker.report_interval_s=2")
SMALL = ("--workers", "2", "--num-envs", "8", *(word for setting in SETTINGS for word in ("--set", setting)))


class Witness:
    """Second names of recorder files: what a life has done can be read although its file was deleted."""

    def __init__(self, run_dir: Path, folder: Path) -> None:
        self._run_dir = run_dir
        self._folder = folder
        folder.mkdir()

    def watch(self, slot: int, incarnation: int) -> bool:
        """Keep the recorder of this life. True once it has taken steps."""
        name = f"worker-{slot}-{incarnation}.rec"
        kept = self._folder / name
        if not kept.exists() and self.left(slot, incarnation):
            os.link(self._run_dir / "recorders" / name, kept)
        reading = read_recorder(kept)
        return reading is not None and reading.totals.stepped > 0

    def left(self, slot: int, incarnation: int) -> bool:
        """Return whether the recorder stands in the run directory."""
        return (self._run_dir / "recorders" / f"worker-{slot}-{incarnation}.rec").exists()

    def accepted(self, slot: int, incarnation: int) -> int:
        """How many batches of this life a broker has accepted."""
        reading = read_recorder(self._folder / f"worker-{slot}-{incarnation}.rec")
        return reading.accepted if reading is not None else 0

    def readings(self) -> list[Reading]:
        """The totals of each watched life at its end."""
        found = [read_recorder(path) for path in sorted(self._folder.iterdir())]
        return [reading for reading in found if reading is not None]


def books_are_those_of(witness: Witness, books: dict[str, Any]) -> None:
    """The rows, and the sums of older lives, have what the recorders of the watched lives have."""
    rows = {(row["slot"], row["incarnation"]): row for row in books["rows"]}
    folded = {lives["row"]["slot"]: FoldedLives.model_validate_json(orjson.dumps(lives)) for lives in books["folded"]}
    added: Counter[int] = Counter()
    for reading in witness.readings():
        if reading.slot in folded and reading.incarnation in folded[reading.slot]:
            added[reading.slot] += reading.totals.stepped
            continue
        row = rows[reading.slot, reading.incarnation]
        assert (row["totals"]["stepped"], row["closed"]) == (reading.totals.stepped, True)
    assert added == {slot: lives.row.totals.stepped for slot, lives in folded.items()}, "every life was watched"


def second_broker_knows_while_redis_stands_still(fleet: RunningFleet, witness: Witness) -> None:
    fleet.send(signal.SIGSTOP, "redis")
    fleet.send(signal.SIGKILL, "worker", slot=0)
    fleet.wait_until(lambda: witness.watch(0, 2), "the next life of slot 0 samples")
    fleet.send(signal.SIGKILL, "broker")
    accepted = witness.accepted(0, 2)
    fleet.wait_until(lambda: witness.accepted(0, 2) > accepted + 1, "the next broker takes batches")


def recorder_has_just_been_deleted(fleet: RunningFleet, witness: Witness) -> None:
    fleet.send(signal.SIGKILL, "worker", slot=0)
    fleet.wait_until(lambda: not witness.left(0, 1), "the recorder of the dead worker is deleted")
    witness.watch(0, 2)


def neither_redis_nor_the_learner_knows_the_next_life(fleet: RunningFleet, witness: Witness) -> None:
    fleet.send(signal.SIGSTOP, "redis")
    fleet.send(signal.SIGSTOP, "learner")
    fleet.send(signal.SIGKILL, "worker", slot=0)
    fleet.wait_until(lambda: witness.watch(0, 2), "the next life of slot 0 samples")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("moment", "lost"),
    [
        (second_broker_knows_while_redis_stands_still, ()),
        (recorder_has_just_been_deleted, ()),
        (neither_redis_nor_the_learner_knows_the_next_life, ("broker.json",)),
    ],
)
def test_the_books_have_a_dead_workers_totals_after_a_kill_of_every_process(
    tmp_path: Path, moment: Callable[[RunningFleet, Witness], None], lost: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    witness = Witness(run, tmp_path / "witness")
    with RunningFleet(run, *SMALL) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 3_000, "training has begun")
        assert witness.watch(0, 1)
        assert witness.watch(1, 1)
        moment(fleet, witness)
        fleet.kill_everything()
    for name in lost:
        (run / name).unlink()
    with RunningFleet(run, *SMALL, "--until-steps", "10000") as fleet:
        result = fleet.finish()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    books_are_those_of(witness, fleet.audited())
    assert list((run / "recorders").iterdir()) == []
    deep = fleet.deep_audit()
    assert deep.returncode == 0, deep.stdout + deep.stderr


@pytest.mark.thorough
def test_the_books_keep_folded_lives_after_a_redis_flush_and_a_kill_of_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    witness = Witness(run, tmp_path / "witness")
    with RunningFleet(run, *SMALL) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 3_000, "training has begun")
        for life in range(1, 5):
            fleet.wait_until(lambda life=life: witness.watch(0, life), f"life {life} samples")
            fleet.send(signal.SIGKILL, "worker", slot=0)
        fleet.wait_until(lambda: witness.watch(0, 5) and witness.watch(1, 1), "the fifth life samples")
        fleet.wait_until(lambda: folded_lives(fleet) == 3, "three lives are folded")
        page = read_fleet_file(run / "fleet.json")
        with redis.Redis.from_url(page.redis_url) as client:
            client.flushall()
        fleet.wait_until(lambda: folded_lives(fleet) == 3, "the broker reports all again")
        fleet.wait_until(lambda: not witness.left(0, 4), "the recorder of the last dead worker is deleted")
        fleet.kill_everything()
    with RunningFleet(run, *SMALL, "--until-steps", "5000") as fleet:
        result = fleet.finish()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    books_are_those_of(witness, fleet.audited())
    assert list((run / "recorders").iterdir()) == []
    deep = fleet.deep_audit()
    assert deep.returncode == 0, deep.stdout + deep.stderr


def folded_lives(fleet: RunningFleet) -> int:
    """How many lives of slot 0 have no row of their own any more."""
    snapshot = fleet.snapshot()
    return snapshot.folded[0].lives if snapshot is not None and 0 in snapshot.folded else 0
