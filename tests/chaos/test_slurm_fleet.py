"""Fleets on a real Slurm, by the shipped scripts: faults of jobs, any order of starts, and shared nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from documentation.blocks import blocks_of

from headrace.deploy.annexes.slurm.lifecycle import dry_run, prepare
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.options import Asked
from headrace.schemas.errors import ExitCode
from support.fleets.slurm_fleet import SlurmFleet
from support.slurm_cluster import MISSING, SlurmCluster
from support.waiting import PATIENCE

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.chaos,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

NOT_CHECKED = "check_env = false"
QUICK_LEARNER = """
[learner]
steps_per_update = 512
epochs = 2
"""
QUICK = f"""{QUICK_LEARNER}
[sampling]
num_envs = 4
"""
LEARNT = 40
"""Mean return that no untrained policy has: about twice that of random actions."""
FREE_S = 12.0 * PATIENCE
"""Seconds in which a failed head frees its nodes, on a busy machine too: with six busy loops beside it on two cores,
it took 6 s at most."""
ON_A_CLUSTER = "tests/chaos/test_slurm_fleet.py runs it on one"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster
    assert not cluster.processes(), "processes of jobs have outlived their cluster"


@pytest.mark.thorough
def test_the_guides_commands_and_faults_of_jobs_leave_the_books_exact(
    cluster: SlurmCluster, tmp_path: Path, root: Path
) -> None:
    blocks = blocks_of(root / "docs" / "guides" / "deploy" / "slurm.md")
    toml = next(block.text for block in blocks if block.language == "toml")
    settings = toml.replace("until_return = 475.0", NOT_CHECKED) + QUICK_LEARNER
    fleet = SlurmFleet(cluster, tmp_path / "runs" / "cartpole", tmp_path / "fleet.toml", settings)
    start, look, scale, move, stop = (
        block.text for block in blocks if ON_A_CLUSTER in block.marks.get("shown only", "")
    )
    fleet.sh(start)
    fleet.wait_until(lambda: fleet.working() == 2, "two workers take steps")
    requeued, limited = fleet.tasks()
    fleet.sh(scale)
    assert "is running" in fleet.sh(look)
    cluster.run("scontrol", "update", f"JobId={limited}", "TimeLimit=1")  # SIGTERM comes at Slurm's next look
    again = fleet.headrace("slurm", "up", str(fleet.toml))
    assert (again.returncode, "its jobs are still there" in again.stderr) == (ExitCode.RUN_DIR, True), again
    fleet.wait_until(lambda: fleet.have_worked() >= 3, "a third worker takes steps")
    (cancelled,) = fleet.tasks(-1)

    fleet.kill("broker")
    cluster.run("scontrol", "requeue", requeued)
    cluster.run("scancel", cancelled)
    cluster.wait_for(limited, "COMPLETED", "TIMEOUT")  # by then its minute may be over
    cluster.wait_for(cancelled, "CANCELLED")
    cluster.wait_for(requeued, "PENDING")
    missing = fleet.headrace("slurm", "status", "--run-dir", str(fleet.run_dir))
    assert (missing.returncode, "1 of 3 worker tasks are there" in missing.stdout) == (ExitCode.FINDINGS, True), missing
    with fleet.topped_up():
        fleet.wait_until(lambda: "1 -> 3" in fleet.topped_up_log.read_text(), "the missing tasks are submitted")
        fleet.sh(move)
        cluster.wait_for(fleet.head, "PENDING")
        for job in (fleet.head, requeued):
            cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        fleet.wait_until(lambda: fleet.working() == 3, "three workers of the head that has moved")
        fleet.wait_until(lambda: fleet.best_return() > LEARNT, "the policy learns")
        fleet.sh(stop)
    assert not fleet.left()
    ledger = fleet.assert_books_are_exact()["ledger"]
    assert (ledger["queued"], ledger["committed"][0] > 0) == (0, True), ledger


@pytest.mark.thorough
def test_the_guides_fleet_trains_cartpole_to_its_goal(cluster: SlurmCluster, tmp_path: Path, root: Path) -> None:
    blocks = blocks_of(root / "docs" / "guides" / "deploy" / "slurm.md")
    toml, start = (next(block.text for block in blocks if block.language == language) for language in ("toml", "sh"))
    fleet = SlurmFleet(cluster, tmp_path / "runs" / "cartpole", tmp_path / "fleet.toml", toml)
    fleet.sh(start)
    fleet.await_end()
    assert fleet.best_return() >= 475, fleet.said()
    assert {job.state for job in fleet.all_tasks()} == {"COMPLETED"}, fleet.said()
    fleet.assert_books_are_exact()


@pytest.mark.thorough
@pytest.mark.parametrize("start", range(10))
def test_two_fleets_that_start_together_on_a_node_reach_their_goals(
    cluster: SlurmCluster, tmp_path: Path, start: int
) -> None:
    shared = '[slurm]\noptions = ["--nodelist=node2"]\nworker_tasks = 1\n'
    goal = f"[fleet]\n{NOT_CHECKED}\nuntil_steps = 2000\n"
    fleets = [
        SlurmFleet(cluster, tmp_path / name, tmp_path / f"{name}.toml", f"{goal}{QUICK}{shared}")
        for name in (f"one-{start}", f"two-{start}")
    ]
    for fleet in fleets:
        fleet.up()
    for fleet in fleets:
        fleet.await_end()
        assert {(job.state, job.node) for job in fleet.all_tasks()} == {("COMPLETED", "node2")}, fleet.said()
    one, two = (fleet.assert_books_are_exact() for fleet in fleets)
    assert one["fleet_id"] != two["fleet_id"]


@pytest.mark.parametrize(
    "part", ["up", *(pytest.param(part, marks=pytest.mark.thorough) for part in ("broker", "learner", "redis"))]
)
def test_nodes_are_free_soon_after_a_part_of_the_head_has_failed_for_good(
    cluster: SlurmCluster, tmp_path: Path, part: str, record_property: Callable[[str, object], None]
) -> None:
    fails = f"[fleet]\n{NOT_CHECKED}\n[supervisor]\nrestart_attempts = 0\n"
    fleet = SlurmFleet(cluster, tmp_path / part, tmp_path / "fleet.toml", f"{fails}{QUICK}")
    fleet.up()
    fleet.wait_until(lambda: fleet.working() == 2, "two workers take steps")
    began = time.monotonic()
    fleet.kill(part)
    fleet.await_end()
    held_s = time.monotonic() - began
    record_property("held_s", held_s)  # `pytest --junit-xml` writes it
    assert held_s < FREE_S, f"nodes were free after {held_s:.1f} s\n{fleet.said()}"


def test_a_fleet_with_env_hosts_shares_a_node_with_a_fleet_that_fails(cluster: SlurmCluster, tmp_path: Path) -> None:
    shared = f'{QUICK}[slurm]\noptions = ["--nodelist=node2"]\nhead_options = ["--cpus-per-task=1"]\n'
    fails = "[supervisor]\nrestart_attempts = 0\n"
    late = f"[fleet]\n{NOT_CHECKED}\n{fails}{shared}worker_tasks = 1\nworkers_per_task = 2\n"
    hosted = f"[fleet]\n{NOT_CHECKED}\nworkers = 1\n{shared}worker_tasks = 1\nenv_host_tasks = 2\n"
    hosted = hosted.replace("[sampling]", '[sampling]\nenv_placement = "remote"')
    one = SlurmFleet(cluster, tmp_path / "one", tmp_path / "one.toml", late)
    two = SlurmFleet(cluster, tmp_path / "two", tmp_path / "two.toml", hosted)
    config = Asked(one.toml, flags={"fleet.run_dir": str(one.run_dir)}).settings
    prepare(config)
    head, workers = dry_run(config)
    workers.remove("--dependency=after:HEAD_JOB_ID")
    array = int(cluster.run(*workers))
    one.wait_until(lambda: "waiting for" in one.said(), "workers without a head say what they wait for")
    two.up()
    one.note_jobs(int(cluster.run(*head)), array)
    one.wait_until(lambda: one.working() == 2, "two workers of the head that came last")
    one.kill("broker")
    two.wait_until(lambda: two.working() == 2, "a worker of the head job and one of the array, each with an env host")
    cluster.run("scancel", two.head)  # all others leave with it
    two.await_end()
    one.await_end()
    assert {(job.name, job.state, job.node) for job in one.all_tasks()} == {
        ("one-head", "FAILED", "node2"),
        ("one-workers", "COMPLETED", "node2"),
    }, one.said()
    assert {(job.name, job.node) for job in two.all_tasks()} == {
        ("two-head", "node2"),
        ("two-workers", "node2"),
        ("two-env-hosts", "node2"),
    }, two.said()
    one.assert_recorders_tell_the_rest(2)
    books = two.assert_books_are_exact()
    assert {row["closed"] for row in books["rows"]} == {True}
    assert books["fleet_id"] != read_fleet_file(one.run_dir / "fleet.json").fleet_id


def test_a_job_that_slurm_refuses_is_reported_and_submitted_jobs_are_cancelled(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    settings = '[slurm]\noptions = ["--partition=nowhere"]\nhead_options = ["--partition=main", "--hold"]\n'
    fleet = SlurmFleet(cluster, tmp_path / "run", tmp_path / "fleet.toml", settings)
    refused = fleet.headrace("slurm", "up", "fleet.toml", "--run-dir", "run")
    assert refused.returncode == ExitCode.UNREACHABLE
    assert "workers.sbatch" in refused.stderr
    assert "invalid partition specified: nowhere" in refused.stderr
    assert "name one that `sinfo` shows" in refused.stderr
    fleet.await_end()
    assert [task.state for task in fleet.all_tasks()] == ["CANCELLED"]
