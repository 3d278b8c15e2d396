"""Run directory or Redis may be lost with everything killed: training goes on from the last checkpoint."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.files.lifetime_file import Lifetime, LifetimeFile
from headrace.broker.redis.client import connect
from headrace.broker.reports.report import SavedState, read_saved_state
from headrace.deploy.fleet.checkpoint_copy import copies_in
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.deploy.run.resume import read_told
from headrace.learner_stub.checkpoints.checkpoint import decode_checkpoint
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.recorder import read_recorder
from support.fleets.running_fleet import RunningFleet, redis_in
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.chaos

FLEET = "two-copies"
SETTINGS = ("learner.epochs=1", f"fleet.fleet_id={FLEET}")
SMALL = ("--workers", "2", "--num-envs", "8", *(word for setting in SETTINGS for word in ("--set", setting)))
CHECKPOINT = "learner.checkpoint"
LOGS = (
    *("--env", "support.envs.troubled:Troubled", "--no-check-env"),
    *("--set", 'sampling.env_config={"lane": 1, "faults": {"step": "raises"}}'),
    *("--set", 'sampling.callbacks=["support.pipeline.worker_callbacks:CountsEpisodes"]'),
)
"""One env of each life of a worker fails once, and callbacks log a sum."""


def in_redis(url: str) -> Snapshot:
    with FleetView(url, FLEET) as view:
        return view.read()


def lifetime_of(known: Lifetime | SavedState) -> dict[str, float]:
    """Return the steps of runners, the sum that callbacks have logged, and the failures of envs, of all lives."""
    steps = [counters["num_env_steps_sampled_lifetime"] for counters in known.runner_state.values()]
    return {
        "steps of runners": sum(count for count in steps if isinstance(count, int)),
        "logged sum": sum(life.sums["episodes"] for life in known.metric_sums.values()),
        "env failures": sum(row.count for row in known.env_errors.values()),
    }


def told_by(run_dir: Path) -> dict[str, Any]:
    """Return the header of the newest checkpoint."""
    told = read_told(run_dir / CHECKPOINT)
    assert told is not None
    return told


def until_copied(fleet: RunningFleet, run_dir: Path, url: str) -> dict[str, Any]:
    """Wait until Redis has a copy of the newest checkpoint, or of a newer one. Return the header of that checkpoint."""
    known = told_by(run_dir)
    with connect(url) as client:
        copies = copies_in(client, FLEET)
        fleet.wait_until(lambda: (copies.version() or ()) >= (known["epoch"], known["saves"]), "a copy of it")
    return known


def trained_by_copy(url: str) -> dict[tuple[int, int], int]:
    """Return the steps of each life that the checkpoint in Redis was trained on."""
    with connect(url, TIMEOUT_S) as client:
        copy = copies_in(client, FLEET).load()
    assert copy is not None
    position = decode_checkpoint(b"".join(copy.frames), "the copy").position
    return {(place["slot"], place["incarnation"]): place["settled"]["committed"][0] for place in position}


def train_and_kill_everything(run_dir: Path, *options: str, known: Callable[[], bool] = lambda: True) -> None:
    """Train until a dead worker's next life samples and `known` is true. Then kill all processes."""
    with RunningFleet(run_dir, *SMALL, *options) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 6_000, "training has begun")
        # A life that has ended, whose recorder is deleted, is in the books too.
        fleet.send(signal.SIGKILL, "worker", slot=0)
        recorder = run_dir / "recorders" / "worker-0-1.rec"
        fleet.wait_until(lambda: not recorder.exists(), "the dead worker's recorder is deleted")
        before = fleet.steps()
        fleet.wait_until(lambda: fleet.steps() > before + 2_000, "its next life samples")
        fleet.wait_until(known, "the counters that the test compares")
        fleet.kill_everything()


def go_on(run_dir: Path, *options: str) -> tuple[str, dict[tuple[int, int], LedgerRow]]:
    """Run for a while more, drain, and judge the books. Return what the supervisor said, and the rows."""
    with RunningFleet(run_dir, *SMALL, *options, "--until-steps", "5000") as fleet:
        result = fleet.finish()
    said = result["stderr"]
    assert (result["returncode"], result["goal_reached"], result["balanced"]) == (0, True, True), f"{said}\n{result}"
    assert result["ledger"]["queued"] == 0, said
    books = fleet.audited()  # folded lives stand as incarnation 0
    told = [*books["rows"], *(lives["row"] for lives in books["folded"])]
    rows = {(row["slot"], row["incarnation"]): LedgerRow.model_validate_json(orjson.dumps(row)) for row in told}
    folded = {lives["row"]["slot"]: lives["highest"] for lives in books["folded"]}
    for place in told_by(run_dir)["position"]:
        if place["incarnation"] <= folded.get(place["slot"], 0):
            continue
        row = rows[place["slot"], place["incarnation"]]
        assert place["settled"]["committed"][0] <= row.settled.committed[0], "the ledger knows no less than the learner"
    deep = fleet.deep_audit()
    assert deep.returncode == 0, deep.stdout + deep.stderr
    return said, rows


def trained_on_copy(said: str, rows: dict[tuple[int, int], LedgerRow]) -> int:
    """Steps that the model must have been trained on: all that are committed, but those after the copy."""
    lost = re.search(r"; ([\d,]+) steps that the learner took after it stay committed", said)
    committed = sum(row.settled.committed[0] for row in rows.values())
    return committed - (int(lost[1].replace(",", "")) if lost is not None else 0)


def test_with_the_run_directory_lost_training_goes_on_from_the_copy_in_redis(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with redis_in(tmp_path / "elsewhere") as (url, _):
        train_and_kill_everything(run, "--redis-url", url)
        shutil.rmtree(run)
        before, trained = in_redis(url), trained_by_copy(url)
        said, rows = go_on(run, "--redis-url", url)
        assert f"the run directory has no {CHECKPOINT}; going on from the one in Redis, save " in said
        for life, row in before.rows.items():
            kept = rows.get(life, rows.get((life[0], 0)))
            assert kept is not None
            assert kept.closed
            known = max(row.totals.stepped, trained.get(life, 0))  # the broker may not have reported what is trained on
            assert kept.totals.stepped == known, "no more than Redis knew, and no less"
        for slot, incarnation in before.incarnations.items():
            first = re.search(rf"worker-{slot} started: pid \d+, incarnation (\d+)", said)
            assert first is not None
            assert int(first[1]) > incarnation, "a life with a used number is fenced"
        assert told_by(run)["epoch"] == 2
        assert told_by(run)["state"]["steps"] == trained_on_copy(said, rows)


def test_with_redis_lost_training_goes_on_from_the_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with redis_in(tmp_path / "first") as (url, _):
        file = LifetimeFile(run, FLEET)  # the broker pauses for a second after each write of it
        train_and_kill_everything(run, "--redis-url", url, *LOGS, known=lambda: all(lifetime_of(file.read()).values()))
        before = in_redis(url)
    told, lifetime = told_by(run), lifetime_of(LifetimeFile(run, FLEET).read())
    recorders = {path.name: read_recorder(path) for path in (run / "recorders").glob("*.rec")}
    with redis_in(tmp_path / "second") as (url, _):
        said, rows = go_on(run, "--redis-url", url, *LOGS)
        with connect(url, TIMEOUT_S) as client:
            after = lifetime_of(read_saved_state(client, FLEET))
    for kind, count in lifetime.items():
        assert after[kind] > count > 0, f"{kind} of the lives before, and more"
    assert f"going on from {CHECKPOINT} in the run directory, save {told['saves']:,} of learner epoch 1; Redis" in said
    for life, row in before.rows.items():
        reading = recorders.get(f"worker-{life[0]}-{life[1]}.rec")
        made = reading.totals.stepped if reading is not None else row.totals.stepped
        kept = rows.get(life, rows.get((life[0], 0)))
        assert kept is not None
        assert kept.totals.stepped == made, "its row, or the only one that is folded"
        assert kept.closed
    trained = sum(row.settled.committed[0] for row in rows.values())
    assert told_by(run)["state"]["steps"] == trained, "every committed step is in the model, and none twice"


def test_a_run_moved_to_another_folder_and_ports_goes_on_training(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    train_and_kill_everything(run)
    told = told_by(run)
    run.rename(moved)
    taken = orjson.loads((moved / "redis" / "server.json").read_bytes())["port"]
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # another program has it already
            other.bind(("127.0.0.1", taken))
        said, rows = go_on(moved)
    assert f"save {told['saves']:,} of learner epoch 1" in said
    assert told_by(moved)["state"]["steps"] == sum(row.settled.committed[0] for row in rows.values())


def steps_of(run_dir: Path) -> int:
    """Return the steps that the newest checkpoint was trained on; 0 while there is none."""
    told = read_told(run_dir / CHECKPOINT)
    return int(told["state"]["steps"]) if told is not None else 0


@pytest.mark.thorough
def test_the_run_directory_then_redis_then_the_places_of_both_may_be_lost_in_one_run(tmp_path: Path) -> None:
    """It prints how long each start takes until a new update is trained."""
    run = tmp_path / "run"
    lost: list[str] = []
    copied = 0

    def train_then_kill(url: str, what: str) -> None:
        nonlocal copied
        began = time.monotonic()
        with RunningFleet(run, *SMALL, "--redis-url", url, "--set", f"redis.bytes_per_hour={1 << 40}") as fleet:
            fleet.wait_until(
                lambda: (run / "fleet.json").exists() and fleet.pid("broker"), "the choice of a checkpoint"
            )
            before = steps_of(run)
            assert before >= copied, "it goes on from the last checkpoint, or its copy"
            fleet.wait_until(lambda: steps_of(run) > before, "a new update")
            print(f"{what}: {time.monotonic() - began:.1f} s from the start of `up` to the first new update")  # noqa: T201
            fleet.wait_until(lambda: steps_of(run) > before + 6_000, "it trains on")
            copied = until_copied(fleet, run, url)["state"]["steps"]
            fleet.kill_everything()
            lost.append(fleet.said())

    with redis_in(tmp_path / "redis") as (url, _):
        train_then_kill(url, "a new run")
        shutil.rmtree(run)
        train_then_kill(url, "the run directory deleted")
        with connect(url) as client:
            client.flushall()
        train_then_kill(url, "Redis emptied")
    run = run.rename(tmp_path / "moved")
    (tmp_path / "redis").rename(tmp_path / "redis-moved")
    server_json = tmp_path / "redis-moved" / "redis" / "server.json"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
    server_json.write_bytes(orjson.dumps(orjson.loads(server_json.read_bytes()) | {"port": free}))
    with redis_in(tmp_path / "redis-moved") as (moved_url, _):
        assert moved_url != url
        train_then_kill(moved_url, "both moved")
        said, rows = go_on(run, "--redis-url", moved_url)
    committed = sum(row.settled.committed[0] for row in rows.values())
    told_as_lost = -sum(trained_on_copy(words, {}) for words in (*lost, said))
    assert steps_of(run) == committed - told_as_lost, "every committed step is in the model once"


OWN_LEARNER = """
import sys
import time
import torch
from headrace.learner_stub import EpisodeStream, LearnerState

run, seen = sys.argv[1], open(sys.argv[2], "a", buffering=1)
time.sleep(float(sys.argv[3]))
state = LearnerState.of(run, connect_timeout_s=150.0)
saved = state.load()
steps, position = (saved.steps, saved.position) if saved is not None else (0, None)
print("from", steps, file=seen)
with EpisodeStream.of(run, auto_commit=False, position=position, connect_timeout_s=150.0) as stream:
    for batch in stream:
        steps += batch.steps
        for chunk in batch:
            print(steps, chunk.episode_id, chunk.chunk_index, len(chunk), chunk.end.name, file=seen)
        state.save(stream, {"seen": torch.tensor([float(steps)])}, steps=steps)
        stream.commit()
"""


@contextmanager
def own_learner(run_dir: Path, seen: Path, late_s: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    learner = subprocess.Popen([sys.executable, "-c", OWN_LEARNER, str(run_dir), str(seen), str(late_s)])
    try:
        yield learner
    finally:
        learner.kill()
        learner.wait()


@pytest.mark.thorough
@pytest.mark.parametrize(("lost", "late_s"), [("the run directory", 0.0), ("Redis", 0.0), ("the run directory", 12.0)])
def test_a_learner_of_ones_own_goes_on_and_gets_the_end_of_each_open_episode(
    tmp_path: Path, lost: str, late_s: float
) -> None:
    """A learner may also come once the fleet has reached its goal, and is being drained."""
    run, seen = tmp_path / "run", tmp_path / "seen"
    own = ("--set", "learner.enabled=false", "--set", "worker.random_actions_before_weights=true")
    with redis_in(tmp_path / "first") as (first, _), redis_in(tmp_path / "second") as (second, _):
        with RunningFleet(run, *SMALL, *own, "--redis-url", first) as fleet, own_learner(run, seen) as learner:
            fleet.wait_until(lambda: steps_of(run) > 6_000, "it trains")
            fleet.send(signal.SIGKILL, "worker", slot=0)
            before = steps_of(run)
            fleet.wait_until(lambda: steps_of(run) > before + 4_000, "it trains on")
            until_copied(fleet, run, first)
            learner.kill()
            fleet.kill_everything()
        if lost == "Redis":
            first = second
        else:
            shutil.rmtree(run)
        with own_learner(run, seen, late_s) as learner:
            said, rows = go_on(run, *own, "--redis-url", first)
            learner.wait(TIMEOUT_S)
    lives: list[tuple[int, list[list[str]]]] = []
    for line in seen.read_text().splitlines():
        words = line.split()
        if words[0] == "from":
            lives.append((int(words[1]), []))
        elif len(words) == 5:
            lives[-1][1].append(words)
    (_, earlier), (resumed_at, later) = lives
    assert resumed_at > 6_000
    earlier = [words for words in earlier if int(words[0]) <= resumed_at]
    chunks = [(episode, index) for _, episode, index, length, _ in (*earlier, *later) if length != "0"]
    assert len(chunks) == len(set(chunks)), "no chunk was trained on twice"
    ended = {episode for _, episode, _, _, end in (*earlier, *later) if end != "ONGOING"}
    left = {episode for _, episode, *_ in earlier} - ended
    assert not left, f"{len(left)} episodes have no end"
    assert sum(int(words[3]) for words in (*earlier, *later)) == steps_of(run) == trained_on_copy(said, rows)
