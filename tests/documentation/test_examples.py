"""The learners of `docs/examples/` train on a real fleet, go on after a kill, and learn CartPole."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from documentation.examples import EXAMPLES, EXAMPLES_FOLDER, kill, learner_of, words_of

from headrace.learner_stub.checkpoints.checkpoint import CHECKPOINT_FILE, load_checkpoint
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S, wait_until

MOST_LINES = 150
SPACES = Spaces(observation=Box(shape=(3,), dtype="<f4"), action=Discrete(n=2, start=1))


def fleet_of(example: str, run_dir: Path, *goal: str) -> RunningFleet:
    """The fleet of the docstring, with another goal."""
    words = words_of(example)
    at = words.index("--until-return")
    return RunningFleet(run_dir, *words[:at], *words[at + 2 :], *goal, cwd=EXAMPLES_FOLDER)


def end_of(learner: subprocess.Popen[str]) -> int:
    """Wait for the end of a learner whose fleet has ended; its exit code."""
    said, _ = learner.communicate(timeout=60)
    assert learner.returncode == 0, said
    return learner.returncode


def trained_steps(run_dir: Path) -> int:
    """The steps that the checkpoint was trained on."""
    saved = load_checkpoint(run_dir / CHECKPOINT_FILE)
    assert saved is not None
    assert saved.state["updates"] > 0
    return int(saved.state["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains_on_each_step_of_a_fleet_until_it_ends(tmp_path: Path, example: str) -> None:
    with (
        fleet_of(example, tmp_path, "--workers", "1", "--until-steps", "3000") as fleet,
        learner_of(example, tmp_path) as learner,
    ):
        result = fleet.finish()
        assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
        end_of(learner)
    # a fleet that ends does not wait for long: the last batch may be trained on, and its commit find no broker
    ledger = result["ledger"]
    assert 0 < ledger["committed"][0] <= trained_steps(tmp_path) <= ledger["stepped"]


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.thorough
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_learns_cartpole_though_a_worker_and_the_learner_are_killed(tmp_path: Path, example: str) -> None:
    with fleet_of(example, tmp_path, "--until-return", "475", "--timeout-s", "900") as fleet:
        with learner_of(example, tmp_path) as learner:
            fleet.wait_for_steps(20_000)
            fleet.send(signal.SIGKILL, "worker", 0)
            kill(learner)
        before = trained_steps(tmp_path)
        with learner_of(example, tmp_path) as learner:
            result = fleet.finish(timeout_s=960.0)
            assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
            end_of(learner)
    assert result["mean_return"] >= 475
    ledger = result["ledger"]
    assert before < ledger["committed"][0] <= trained_steps(tmp_path) <= ledger["stepped"]


def pid_of_rank(launcher: subprocess.Popen[str], rank: int) -> int:
    """Return the process that torchrun has started as `rank`."""
    own = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")

    def found() -> list[int]:
        children = [Path(f"/proc/{child}") for child in own.read_text().split()]
        return [int(at.name) for at in children if f"\0RANK={rank}\0" in (at / "environ").read_text()]

    return wait_until(found, f"rank {rank}")[0]


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_learn_cartpole_though_one_is_killed(tmp_path: Path, rank: int) -> None:
    goal = ("--until-return", "475", "--timeout-s", "500")
    with fleet_of("ddp_ppo", tmp_path, *goal) as fleet, learner_of("ddp_ppo", tmp_path) as learner:
        fleet.wait_for_steps(20_000)
        os.kill(pid_of_rank(learner, rank), signal.SIGKILL)
        result = fleet.finish(timeout_s=560.0)
        assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
        end_of(learner)
    assert result["mean_return"] >= 475
    ledger = result["ledger"]
    assert ledger["committed"][0] <= trained_steps(tmp_path) <= ledger["stepped"], "each step was trained on once"


@pytest.mark.parametrize("example", [*EXAMPLES, "clone", "curriculum", "level_replay"])
def test_an_example_is_short_and_imports_what_users_may_import(example: str) -> None:
    text = (EXAMPLES_FOLDER / f"{example}.py").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    homes = {line.split()[1] for line in text.splitlines() if line.startswith("from headrace")}
    assert homes <= {"headrace"}


@pytest.mark.slow
def test_a_clone_learns_cartpole_from_the_recording_of_a_learner(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")
    settings = ["--set", "broker.consumer_groups.record=wait"]
    goal = ["--workers", "1", "--num-envs", "8", "--seed", "0", "--until-steps", "50000"]
    record = [sys.executable, "-m", "headrace.deploy", "record", str(tmp_path / "run"), "--dir", "recording"]
    with (
        RunningFleet(tmp_path / "run", "--env", "CartPole-v1", *goal, *settings) as fleet,
        subprocess.Popen(record, cwd=tmp_path) as recorder,
    ):
        assert fleet.finish()["returncode"] == 0
        assert recorder.wait(TIMEOUT_S) == 0
    command = [sys.executable, str(EXAMPLES_FOLDER / "clone.py"), "recording"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    before, after = (float(line.split()[2]) for line in done.stdout.splitlines())
    assert before < 60, "a net that was not trained"
    assert after > 300, done.stdout


@pytest.mark.slow
def test_a_teacher_adds_doors_that_all_envs_of_its_fleet_get(tmp_path: Path) -> None:
    command = [sys.executable, "curriculum.py", str(tmp_path / "run"), "--steps", "24000"]
    done = subprocess.run(command, cwd=EXAMPLES_FOLDER, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    doors = [int(line.split()[2]) for line in done.stdout.splitlines() if "steps:" in line]
    assert doors == sorted(doors)
    assert doors[-1] >= 3, done.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_a_teacher_that_replays_levels_teaches_the_first_ones_sooner_than_equal_draws(tmp_path: Path) -> None:
    command = [sys.executable, "level_replay.py", str(tmp_path / "run"), "--steps", "21000"]
    done = subprocess.run(command, cwd=EXAMPLES_FOLDER, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    learnt = [int(line.split()[2]) for line in done.stdout.splitlines() if "steps:" in line]
    assert learnt[-1] >= 8, done.stdout  # 12 to 17 in 14 runs, and 0 to 4 in 6 that drew all levels equally often


# -- parts of the DQN --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dqn() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dqn", EXAMPLES_FOLDER / "dqn.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Timed(gym.Env[Any, Any]):
    """Tells its episode and step. Episodes of 5 steps terminate, of 7 are truncated, and some steps fail."""

    observation_space = gym.spaces.Box(-1.0, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(2, start=1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.name = 0, float(self.np_random.integers(1 << 20))
        self.length = int(self.np_random.choice([5, 7]))
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([self.name, self.t, self.length], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.t += 1
        if self.np_random.random() < 0.02:
            raise RuntimeError("fell over")
        over = self.t == self.length
        return self.observe(), float(self.t), over and self.length == 5, over and self.length == 7, {}


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_n_step_transitions_equal_a_plain_loop_over_the_chunks(
    dqn: ModuleType, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(dqn, "N_STEP", steps)
    config = EnvRunnerConfig(env=Timed, num_envs=3, rollout_fragment_length=8, seed=3, module=dqn.QNetwork)
    seen = set()
    with SingleAgentEnvRunner(config) as runner:
        for batch in (runner.sample_fragment() for _ in range(20)):
            obs, actions, returns, next_obs, discounts = dqn.n_step(batch.transitions())
            assert len(obs) == batch.steps
            for row, number in enumerate(batch.transitions().chunk):
                chunk = batch._chunk(int(number))
                t = row - int(batch.offsets[number])
                stop = min(t + steps, len(chunk))
                over = stop == len(chunk) and chunk.end is ChunkEnd.TERMINATED
                total = sum(dqn.GAMMA ** (k - t) * chunk.rewards[k] for k in range(t, stop))
                assert returns[row] == pytest.approx(total, rel=1e-6)
                assert discounts[row] == pytest.approx(0.0 if over else dqn.GAMMA ** (stop - t), rel=1e-6)
                np.testing.assert_array_equal((obs[row], next_obs[row]), (chunk.obs[t], chunk.obs[stop]))
                assert actions[row] == chunk.actions[t]
                seen.add(chunk.end)
    assert seen >= {ChunkEnd.ONGOING, ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED}


def test_the_network_explores_at_the_rate_of_its_buffer(dqn: ModuleType) -> None:
    network = dqn.QNetwork(SPACES)
    batch = {"obs": torch.zeros(20_000, 3), "noise": torch.rand(20_000, 2, generator=torch.Generator().manual_seed(0))}
    best = network.forward_inference(batch)["actions"]
    for rate in (0.0, 0.4, 1.0):
        network.exploration_rate.fill_(rate)
        others = network.forward_exploration(batch)["actions"] != best
        assert others.float().mean().item() == pytest.approx(rate / 2, abs=0.02)


def test_a_full_buffer_keeps_the_newest_steps(dqn: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dqn, "REPLAYED", 16)
    replay = dqn.Replay()
    for first in (0, 12, 24, 36):
        replay.add([np.arange(first, first + 12)])
    assert sorted(replay.columns[0]) == list(range(32, 48))
    assert set(replay.sample()[0].tolist()) <= set(range(32, 48))
    replay.add([np.arange(48, 68)])
    assert sorted(replay.columns[0]) == list(range(52, 68)), "more at once than there is room for"


def test_targets_take_the_modules_choice_and_the_target_networks_value(dqn: ModuleType) -> None:
    torch.manual_seed(0)
    module, target = dqn.QNetwork(SPACES), dqn.QNetwork(SPACES)
    obs, after = torch.randn(64, 3), torch.randn(64, 3)
    best = module(after).argmax(1)
    returns, discounts, actions = torch.randn(64), torch.rand(64), torch.randint(1, 3, (64,))
    goal = returns + discounts * target(after)[torch.arange(64), best]
    expected = torch.nn.functional.smooth_l1_loss(module(obs)[torch.arange(64), actions - 1], goal.detach())
    loss = dqn.loss_of(module, target, (obs, actions, returns, after, discounts))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert all(parameter.grad is None for parameter in target.parameters())
