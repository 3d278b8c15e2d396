"""The contract of Redis keys: a real fleet writes every key of the table and no other; other versions are refused."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from documentation.blocks import blocks_of
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from headrace.broker.reports.report import MergeScript, Part, Report
from headrace.deploy.report.audit import find_books
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.redis_server import check_url
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.learner_stub import TaskPublisher
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.figures import GAUGE_TABLE, RESTARTS, WORKER_TABLE
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE
from headrace.schemas.errors import ExitCode, RedisContractError
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

COUNTS = """
from headrace.workers.agents.examples import two_carts


def carts_of_which_each_fails_once(context):
    env = two_carts(context)
    step, left = env.step, [10]

    def step_or_fail(actions):
        left[0] -= 1
        if not left[0] and not context.recreated:
            raise RuntimeError("the simulator diverged")
        return step(actions)

    env.step = step_or_fail
    return env


class Counts:
    def on_episode_end(self, episode, metrics_logger):
        metrics_logger.log_value("episodes", 1, reduce="sum")
"""
AT_TIMES = {"blocked_since_unix_s", "env_failures", "env_failure", "env_failure_age_s", "env_hosts", "serving"}
AT_TIMES |= {"envs_cpu_share", "envs_rss_bytes", "tasks_refused"}
"""Members of a worker's row that it has at times, or with other envs."""
TWO_POLICIES = (
    *("--env", "counts:carts_of_which_each_fails_once", "--workers", "2", "--num-envs", "2"),
    *("--set", 'sampling.policies={"short": {}, "long": {}}', "--set", 'sampling.callbacks=["counts:Counts"]'),
    *("--set", "learner.steps_per_update=256", "--set", "learner.epochs=1"),
    *("--set", 'broker.consumer_groups={"watch": "drop"}'),
    *("--set", "broker.max_batch_bytes=1000000", "--set", "broker.max_held_bytes=4000000"),
)


def key_of(name: str) -> keys.Key | None:
    own = re.sub(r"(:blob:).+", r"\1{version}", name.partition("}:")[2])
    return next((key for key in keys.TABLE if key.name == own), None)


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


@pytest.mark.slow
def test_a_fleet_writes_every_key_of_the_table_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_DASHBOARD__ENABLED")  # which does for all tests what --no-dashboard does here
    (tmp_path / "counts.py").write_text(COUNTS)
    with RunningFleet(tmp_path / "run", *TWO_POLICIES, "--no-dashboard", cwd=tmp_path) as fleet:

        def seen() -> Snapshot:
            return fleet.snapshot() or Snapshot()

        for incarnation in (1, 2):
            fleet.wait_until(lambda it=incarnation: (0, it) in seen().rows, f"steps of life {incarnation}")  # type: ignore[misc]
            fleet.send(signal.SIGKILL, "worker", 0)
        fleet.wait_until(lambda: 0 in seen().folded, "the first life to be folded")
        fleet.wait_until(lambda: seen().policies.keys() == {"short", "long"}, "returns of both policies")
        fleet.wait_until(lambda: (fleet.run_dir / "learner.checkpoint").exists(), "a checkpoint")
        with TaskPublisher.of(fleet.run_dir) as teacher:
            teacher.publish({})
        url, fleet_id = find_books(fleet.run_dir)
        types: dict[keys.Key | None, str] = {}
        with redis.Redis.from_url(url) as client:

            def look() -> bool:
                for name in client.keys(f"headrace:{{{fleet_id}}}:*"):
                    if (kind := client.type(name).decode()) != "none":  # some come and go
                        types[key_of(name.decode())] = kind
                return types.keys() >= set(keys.TABLE)

            fleet.wait_until(look, "every key of the table")
        members = {member.name for member in WORKER_TABLE}
        fleet.wait_until(lambda: members - AT_TIMES <= seen().workers.get(0, {}).keys(), "all of a worker's row")
        snapshot = seen()
        assert snapshot.settings.keys() == set(keys.TOLD_SETTINGS)
        assert (snapshot.settings["fleet.workers"], snapshot.settings["sampling.num_envs"]) == (2, 2)
        assert (
            "dashboard"
            not in snapshot.processes.keys() | read_fleet_file(fleet.run_dir / "fleet.json").endpoints.keys()
        )
        assert (snapshot.processes["supervisor"].disk_free_bytes or 0) > 0
        [group] = snapshot.errors.values()
        assert (group.kind, group.exception, group.message) == (
            "env_exception",
            "RuntimeError",
            "the simulator diverged",
        )
        assert group.where.endswith(f"counts.py:{1 + COUNTS[: COUNTS.index('raise')].count(chr(10))}")
        assert group.traceback.rstrip().endswith("RuntimeError: the simulator diverged")
        assert {name for row in snapshot.workers.values() for name in row} <= members
        assert snapshot.supervisor_totals[keys.labelled(RESTARTS.name, "role", "worker")] == 2
        assert snapshot.totals["sampled_bytes_total"] > 0 < snapshot.totals["committed_bytes_total"]
        assert all(of_policy["len_min"] <= of_policy["len_max"] for of_policy in snapshot.policies.values())
        fleet.terminate()
        assert fleet.finish()["balanced"]
    assert {key: key.type for key in keys.TABLE} == types
    counters = {keys.unlabelled(field)[:2] for field in snapshot.totals}
    assert counters <= {(metric.name, metric.label) for metric in COUNTER_TABLE}
    assert {keys.unlabelled(field)[2] for field in snapshot.totals} >= {"short", "long"}
    at_times = {keys.SESSIONS_REVOKED, "lost_lives_close_unix_s", "workers_blocked"}
    at_times |= {"clients", "client_requests_per_s", "client_latency_s", "aborted_return_mean", "aborted_len_mean"}
    at_times |= {keys.WORKER_RATE}
    gauges = {metric.name for metric in GAUGE_TABLE}
    assert gauges - at_times <= {keys.unlabelled(field)[0] for field in snapshot.gauges} <= gauges
    labels = {metric.name: metric.label for metric in GAUGE_TABLE}
    assert all(labels[name] == label for name, label, _ in map(keys.unlabelled, snapshot.gauges))
    assert snapshot.policy_quantiles["short"].keys() == set(keys.QUANTILES)

    ended = headrace("why", "--run-dir", str(fleet.run_dir))
    assert (ended.returncode, ended.stdout.split()[0]) == (ExitCode.OK, "Ended."), ended
    # A worker may have shipped its last fragment just before its kill, and an env may fail at a fragment's start.
    losses = ("lost by killed workers", "lost by envs that raised", "Nothing lost.")
    assert any(loss in ended.stdout for loss in losses), ended


def test_another_version_of_the_contract_is_refused_by_readers_and_writers(
    url: str, client: Any, fleet_id: str, make_row: Callable[..., LedgerRow]
) -> None:
    client.hset(keys.key_name(fleet_id, keys.FLEET), "contract_version", "1")
    with (
        FleetView(url, fleet_id) as view,
        pytest.raises(RedisContractError, match=f"by contract '1'.*forget {fleet_id}"),
    ):
        view.read()
    with pytest.raises(RedisContractError) as caught:
        check_url(url, fleet_id)
    assert caught.value.exit_code == ExitCode.VERSION_MISMATCH
    report = MergeScript(client, fleet_id)
    with pytest.raises(ResponseError, match=f"CONTRACT .* contract 1, not 2; .*forget {fleet_id}"):
        report(Part(Report(rows=[make_row()])), [], 0)
    assert not client.exists(keys.key_name(fleet_id, keys.LEDGER))

    client.delete(keys.key_name(fleet_id, keys.FLEET))
    check_url(url, fleet_id)
    report(Part(Report(rows=[make_row()])), [], 0)
    with FleetView(url, fleet_id) as view:
        assert view.read().rows.keys() == {(0, 1)}


@pytest.mark.long
def test_redis_forget_removes_the_keys_of_one_fleet_only(
    url: str, client: Any, make_row: Callable[..., LedgerRow]
) -> None:
    gone, other = "left[1]*", "left1"
    for fleet_id in (gone, other):
        MergeScript(client, fleet_id, live_s=900.0)(Part(Report(rows=[make_row()], gauges={"unix_s": 1.0})), [], 0)
    client.set(f"headrace:{{{gone}}}:mine", "of somebody")
    names = [name for name in client.scan_iter() if name.startswith(f"headrace:{{{gone}}}:".encode())]
    assert len(names) > 2

    client.hset(keys.key_name(gone, keys.FLEET), "reported_unix_s", f"{time.time() - 600:.3f}")  # it seldom reports
    refused = headrace("redis", "forget", gone, "--redis-url", url)
    assert (refused.returncode, "still reports" in refused.stderr) == (ExitCode.CONFIG, True)
    client.delete(keys.key_name(gone, keys.GAUGES))
    removed = headrace("redis", "forget", gone, "--redis-url", url)
    assert (removed.returncode, removed.stdout) == (0, f"removed {len(names) - 1} keys of fleet {gone}\n"), (
        removed.stderr
    )
    left = list(client.scan_iter())
    assert not set(left) & set(names)
    assert any(name.startswith(f"headrace:{{{other}}}:".encode()) for name in left)


@given(st.text())
def test_any_text_as_a_label_is_read_back_unchanged(value: str) -> None:
    field = keys.labelled("dropped_agent_steps_total", "reason", value)
    assert keys.unlabelled(field) == ("dropped_agent_steps_total", "reason", value)
    assert "\n" not in field


@pytest.fixture
def seen(tmp_path: Path, url: str, client: Any, fleet_id: str, make_row: Callable[..., LedgerRow]) -> Path:
    """A folder with the fleet that the page on Redis keys shows, as far as Redis and its address go."""
    report = Report(
        rows=[make_row(slot) for slot in range(3)],
        gauges={"env_steps_per_s": 41230.5, "episode_return_mean": 12.25, "unix_s": time.time()},
        workers={slot: {"weights_behind": slot} for slot in range(3)},
    )
    MergeScript(client, fleet_id)(Part(report), [], 0)
    (tmp_path / "runs" / "seen").mkdir(parents=True)
    about = orjson.dumps({"fleet_id": fleet_id, "redis_url": url})
    (tmp_path / "runs" / "seen" / "fleet.json").write_bytes(about)
    return tmp_path


def documented(root: Path, language: str, word: str) -> str:
    """Return the only block of the page on Redis keys that has this word."""
    [found] = [b.text for b in blocks_of(root / "docs/reference/redis.md") if b.language == language and word in b.text]
    return found


def test_the_documented_dashboard_of_thirty_lines_shows_the_fleet_and_that_it_is_gone(
    root: Path, seen: Path, client: Any, fleet_id: str
) -> None:
    program = documented(root, "python", "import redis")
    assert len(program.splitlines()) <= 30

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=seen, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)

    shown = run()
    lines = [line.partition(", as of ") for line in shown.stdout.splitlines()]
    expected = "41,230 env steps/s, mean return 12.25, 3 workers, at most 2 versions behind, 144 steps dropped"
    assert [words for words, _, _ in lines] == [expected] * 3, shown.stderr
    assert all(re.fullmatch(r"\d+\.\d s ago", age) for _, _, age in lines)
    client.delete(*(keys.key_name(fleet_id, key) for key in (keys.GAUGES, keys.WORKERS)))
    assert run().stderr == "gone after 969 env steps\n"


def test_the_documented_line_of_redis_cli_prints_a_gauge(root: Path, seen: Path) -> None:
    programs = [program for program in ("redis-cli", "valkey-cli") if shutil.which(program)]
    if not programs:
        pytest.skip("neither redis-cli nor valkey-cli is installed")
    script = documented(root, "sh", "HGET").replace("redis-cli", programs[0])
    shown = subprocess.run(
        ["sh", "-c", script], cwd=seen, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert (shown.stdout, shown.stderr) == ("41230.5\n", "")
