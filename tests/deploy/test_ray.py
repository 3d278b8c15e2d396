"""Workers on a real Ray of three raylets: killed workers are replaced, all processes end, and books are exact."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from documentation.blocks import blocks_of

from headrace.deploy.process.fork_server import HEADRACE
from headrace.deploy.process.recorders import recorders_in
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.schemas.errors import ExitCode
from support.fleets.ray_cluster import RayCluster, processes_of, ray_cluster
from support.fleets.running_fleet import RunningFleet
from support.ports import free_port
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.ray
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra ray)")

Life = tuple[int, int]
ON_RAY = "tests/deploy/test_ray.py runs it on one"
SLOW_ENV = "support.envs.troubled:Slow"
STEP_S = 0.002
"""Seconds of each step, so that the fleet leaves the CPUs to what starts."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder for the cluster and the nodes, with a path that is short enough for Ray's sockets."""
    path = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RayCluster]:
    with ray_cluster(folder) as made:
        yield made


def on_ray(cluster: RayCluster, run_dir: Path, workers: int, *more: str) -> RunningFleet:
    chosen = [
        f"ray.address={cluster.address}",
        f"ray.workers={workers}",
        "learner.steps_per_update=512",
        "dashboard.enabled=false",
        f'sampling.env_config={{"step_s": {STEP_S}}}',
    ]
    sets = [word for text in (*chosen, "learner.epochs=1") for word in ("--set", text)]
    return RunningFleet(run_dir, "--workers", "0", "--num-envs", "2", "--env", SLOW_ENV, *sets, *more)


def at_work(fleet: RunningFleet) -> set[Life]:
    """The lives that have stepped and have not ended."""
    snapshot = fleet.snapshot()
    rows = snapshot.rows.items() if snapshot is not None else ()
    return {life for life, row in rows if row.totals.stepped and not row.closed}


def workers_left(folder: Path) -> list[str]:
    """Command lines of guards and workers."""
    return [line for line in processes_of(folder / f"headrace-{os.getuid()}") if "headrace.deploy worker" in line]


def recorded(folder: Path, fleet: RunningFleet) -> set[Life]:
    """The lives of a fleet whose recorders are still on their nodes."""
    fleet_id = read_fleet_file(fleet.run_dir / "fleet.json").fleet_id
    return {life for path in folder.glob(f"headrace-*/{fleet_id}/recorders") for life, _ in recorders_in(path)}


def headrace(*words: str, cwd: Path | None = None) -> None:
    """Run a command of Headrace, which must succeed."""
    subprocess.run([*HEADRACE, *words], check=True, timeout=TIMEOUT_S, cwd=cwd)


def guides_commands(root: Path, given: dict[str, str]) -> list[list[str]]:
    """Return the words of the guide's commands on a cluster, without `headrace`. `given` replaces parts of them."""
    blocks = blocks_of(root / "docs" / "guides" / "deploy" / "ray.md")
    text = "".join(block.text for block in blocks if ON_RAY in block.marks.get("shown only", ""))
    for shown, ours in given.items():
        assert shown in text, shown
        text = text.replace(shown, ours)
    return [shlex.split(line, comments=True)[1:] for line in text.splitlines()]


@contextmanager
def left_running(words: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of Headrace in `folder` within the block. Ctrl-C ends it then."""
    process = subprocess.Popen([*HEADRACE, *words], cwd=folder)
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == ExitCode.OK, words
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.thorough
@needs_ray
def test_the_guides_commands_run_workers_on_ray(
    cluster: RayCluster, folder: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    given = {"10.0.0.1:6379": cluster.address, "/shared": str(tmp_path), "BROKER:5701": f"127.0.0.1:{port}"}
    given |= {
        "--workers 8": "--workers 1",
        "--count 8": "--count 1",
        "ray scale 16": "ray scale 2",
        "scale 4": "scale 1",
    }
    up, up_there, *lends, scale_up, scale_down = guides_commands(root, given)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    headrace("keys", "init", "--dir", "keys", cwd=tmp_path)
    sets = ["broker.host=0.0.0.0", f"broker.port={port}", "keys.dir=keys", "fleet.fleet_id=demo"]
    more = [word for text in sets for word in ("--set", text)]
    with RunningFleet(tmp_path / "runs" / "a", "--until-return", "501", *more, cwd=tmp_path, up=up) as fleet:
        fleet.wait_until(lambda: len(at_work(fleet)) == 1, "its worker steps")
        assert len(lends) == 3
        for lend in lends:
            with left_running(lend, tmp_path):
                fleet.wait_until(lambda: len(at_work(fleet)) == 2, f"a worker of {lend} steps")
            fleet.wait_until(lambda: len(at_work(fleet)) == 1, f"the worker of {lend} has left")
        for scale, wanted in ((scale_up, 2), (scale_down, 1)):
            headrace(*scale, cwd=tmp_path)
            fleet.wait_until(lambda count=wanted: len(at_work(fleet)) == count, f"workers after {scale}")
        fleet.terminate()
        assert fleet.finish()["returncode"] == ExitCode.OK, fleet.said()
        fleet.audited()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with RunningFleet(tmp_path / "runs" / "b", "--until-steps", "2000", cwd=tmp_path, up=up_there) as fleet:
        assert fleet.finish()["returncode"] == ExitCode.OK, fleet.said()
    wait_until(lambda: not workers_left(folder), "the end of every worker")


@pytest.mark.thorough
@needs_ray
def test_workers_killed_on_ray_are_replaced_and_the_books_are_exact(
    cluster: RayCluster, folder: Path, tmp_path: Path
) -> None:
    with on_ray(cluster, tmp_path / "run", 2) as fleet:
        fleet.wait_until(lambda: len(at_work(fleet)) == 2, "two workers step")
        first = at_work(fleet)
        raylet, other = cluster.others
        kept = cluster.actor_on(other)

        os.kill(raylet, signal.SIGKILL)
        fleet.wait_until(lambda: len(at_work(fleet) & first) == 1, "the worker of the dead raylet has ended")
        cluster.kill_actor(kept)
        fleet.wait_until(lambda: not at_work(fleet) & first, "the worker of the killed actor has ended")
        fleet.wait_until(lambda: len(at_work(fleet)) == 2, "workers step in their places")

        headrace("ray", "scale", "1", "--run-dir", str(fleet.run_dir))
        fleet.wait_until(lambda: len(at_work(fleet)) == 1, "one worker is left")
        snapshot = fleet.snapshot()
        assert snapshot is not None
        assert not snapshot.fleet.discarded.get("worker_killed"), "workers drain, whatever Ray kills"

        fleet.kill()
    wait_until(lambda: not workers_left(folder), "the end of every worker")
    wait_until(lambda: not processes_of(fleet.run_dir), "the end of every other process")
    lives = recorded(folder, fleet)
    with on_ray(cluster, fleet.run_dir, 1) as resumed:
        resumed.wait_until(lambda: at_work(resumed) - lives, "a worker steps again")
        resumed.wait_until(lambda: not recorded(folder, fleet) & lives, "the broker to know what was left")
        resumed.terminate()
        result = resumed.finish()
    assert result["returncode"] == ExitCode.OK, result["stderr"]
    assert result["restarts"].get("ray", 0) == 0, result["stderr"]
    resumed.audited()
    wait_until(lambda: not workers_left(folder), "the end of every worker")
