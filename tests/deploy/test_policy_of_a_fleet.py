"""From `headrace up` to a usable policy, as a user goes: train, evaluate, load in a script, export, render."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.learner_stub.checkpoints.checkpoint import load_checkpoint
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import gymnasium as gym
import numpy as np
import torch
from headrace.deploy import load_policy

policy = load_policy(sys.argv[1], which="best")
env = gym.make("CartPole-v1")
observation, _ = env.reset(seed=0)
earned, over = 0.0, False
while not over:
    observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
    earned, over = earned + reward, terminated or truncated
program = torch.export.load(policy.export("policy.pt2")).module()
batch = np.random.default_rng(0).uniform(-1, 1, (500, 4)).astype(np.float32)
assert (program(torch.from_numpy(batch)).numpy() == policy.act(batch)).all()
print(earned, sum(p.numel() for p in policy.module.parameters()))
"""


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def headrace(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "headrace.deploy", *arguments, folder=folder)


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "evaluations.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


@pytest.mark.thorough
def test_a_fleet_evaluates_itself_and_leaves_a_policy_to_use(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = ("--workers", "1", "--set", "learner.evaluate_every_steps=6000")
    with RunningFleet(run_dir, "--env", "CartPole-v1", *settings) as fleet:
        fleet.wait_until(lambda: len(evaluations(run_dir)) >= 2, "two evaluations")
        fleet.wait_until(lambda: re.search("env steps .* evaluation ", fleet.said()), "a line of progress with one")
        fleet.terminate()
        summary = fleet.finish()
    assert (summary["returncode"], summary["balanced"]) == (0, True)
    assert summary["ledger"]["committed"][0] == summary["steps"], "what an evaluation plays is in no ledger"
    assert read_fleet_file(run_dir / "fleet.json").incarnations["evaluator"] == 1
    told = evaluations(run_dir)
    rows = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    logged = [row["evaluation/return_mean"] for row in rows if row["kind"] == "evaluation"]
    assert logged == [line["return"]["mean"] for line in told]
    assert all(line["complete"] and line["episodes"] == 10 for line in told)
    best = load_checkpoint(run_dir / "best.checkpoint")
    assert best is not None
    highest = max(told, key=lambda line: line["return"]["mean"])
    assert best.state["updates"] == highest["update"]

    evaluated = headrace("evaluate", "run", "--checkpoint", "best", "--json", "--episodes", "30", folder=tmp_path)
    found = orjson.loads(evaluated.stdout)
    assert (found["episodes"], found["weights"][1]) == (30, highest["update"])
    assert found["return"]["mean"] > 30, "a policy that has learnt nothing gets 10"
    earned, parameters = run("-c", SCRIPT, "run", folder=tmp_path).stdout.split()
    assert float(earned) >= found["return"]["min"] / 2
    assert int(parameters) > 1000


@pytest.mark.thorough
def test_a_run_whose_env_cannot_be_evaluated_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluator cannot step an external env: it says so, and the fleet goes on."""
    monkeypatch.chdir(Path(__file__).parents[1])
    settings = ("--set", "learner.evaluate_every_steps=200", "--set", "learner.steps_per_update=200")
    log = tmp_path / "logs" / "supervisor.log"
    with RunningFleet(tmp_path, "--env", "support.envs.external:Serving", "--workers", "1", *settings) as fleet:
        fleet.wait_until(lambda: log.exists() and "the fleet goes on without it" in log.read_text(), "a word about it")
        before = fleet.steps()
        fleet.wait_until(lambda: fleet.steps() > before + 1000, "more steps")
        fleet.terminate()
        ended = fleet.finish()
    assert (ended["returncode"], ended["balanced"]) == (0, True)
    assert "drives its own episodes" in log.read_text()
    assert not (tmp_path / "evaluations.jsonl").exists()
