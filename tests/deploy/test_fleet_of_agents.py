"""`headrace up` with envs of several agents: the counts in the books, and the errors for bad settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from headrace.deploy.report.audit import find_books
from headrace.deploy.run.redis_server import serving
from headrace.deploy.run.redis_view import FleetView
from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.errors import ExitCode
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.slow

TWO_CARTS = ("--env", "headrace.workers.agents.examples:two_carts")
POLICIES = ("--set", 'sampling.policies={"short": {}, "long": {}}')
ALONE = ("--set", "learner.enabled=false", "--set", "worker.random_actions_before_weights=true")


def up(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    small = ("--workers", "1", "--num-envs", "2", "--seed", "0", "--timeout-s", "180", "--json")
    command = [sys.executable, "-m", "headrace.deploy", "up", "--run-dir", str(run_dir), *small, *arguments]
    return subprocess.run(command, cwd=run_dir, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def test_env_steps_and_steps_of_agents_and_modules_are_counted_apart(tmp_path: Path) -> None:
    # Workers run on until their window is full, since nobody commits: enough for a goal, and nothing is lost by it.
    result = up(tmp_path, *TWO_CARTS, *POLICIES, *ALONE, "--until-steps", "1000")
    assert result.returncode == 0, result.stderr
    found = orjson.loads(result.stdout)
    assert (found["goal_reached"], found["balanced"]) == (True, True)
    assert 1000 <= found["env_steps"] < found["steps"]
    url, fleet_id = find_books(tmp_path)
    with serving(tmp_path, url), FleetView(url, fleet_id) as view:
        totals = view.read().totals
    assert totals["env_steps_total"] == found["env_steps"]
    assert totals["agent_steps_total"] == found["steps"] == found["ledger"]["stepped"]
    by_module = {
        name: totals[labelled("accepted_module_agent_steps_total", "module", name)] for name in ("short", "long")
    }
    assert sum(by_module.values()) == totals["accepted_agent_steps_total"]
    assert min(by_module.values()) > 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (TWO_CARTS, ExitCode.ENV, ("TwoCarts", "MultiAgentEnvRunner, or in a fleet set sampling.policies")),
        (POLICIES, ExitCode.ENV, ("CartPole", "a single-agent env needs SingleAgentEnvRunner", "no policies")),
        (
            (*TWO_CARTS, *POLICIES, "--set", 'sampling.policy_mapping_fn={"short": "short"}'),
            ExitCode.CONFIG,
            ("policy_mapping_fn: agent 'long' is not in the mapping", "['long', 'short']"),
        ),
        (
            (*TWO_CARTS, *POLICIES, "--set", "sampling.policy_mapping_fn=operator:concat"),
            ExitCode.CONFIG,
            ("policy_mapping_fn: agent 'short' was mapped to 'short", "it must be mapped to one of"),
        ),
    ],
)
def test_an_env_that_does_not_fit_its_policies_ends_the_fleet_with_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], code: ExitCode, parts: tuple[str, ...]
) -> None:
    result = up(tmp_path, *arguments, *ALONE)
    assert result.returncode == code, result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for part in parts:
        assert part in error
    assert orjson.loads(result.stdout)["exit_code"] == code


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ('policies={"a/b": {}}', ("'a/b' is no name for a policy", "without '/'")),
        ("policies={}", ("at least one policy",)),
        ('policies={"one": {"builder": "x:y"}}', ("sampling.policies.one.builder", "unknown key")),
        ('policies={"one": 3}', ("sampling.policies.one",)),
    ],
)
def test_malformed_policies_are_refused_before_the_fleet_starts(
    tmp_path: Path, setting: str, parts: tuple[str, ...]
) -> None:
    result = up(tmp_path, *TWO_CARTS, "--set", f"sampling.{setting}")
    assert result.returncode == ExitCode.CONFIG, result.stderr
    for part in parts:
        assert part in result.stderr
    assert not (tmp_path / "fleet.json").exists()
