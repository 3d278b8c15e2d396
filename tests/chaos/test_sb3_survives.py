"""Stable-Baselines3's algorithms train on a real fleet while a worker of it is killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3 import PPO, SAC

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.adapters.sb3 import updates
from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos

OWN = ("--set", "learner.enabled=false", "--set", "module.build=headrace.workers.modules.sb3:build")


def kill_a_worker_then_end(fleet: RunningFleet, steps: Iterator[int], *, kill_after: int, end_after: int) -> int:
    """Kill worker 0 after `kill_after` updates. Once it is back, end the fleet after `end_after` updates or more.

    Return the number of updates. Only one signal is sent: a second one would cut the drain short.
    """
    done, is_ending = 0, False
    for done, _ in enumerate(steps, 1):
        if done == kill_after:
            fleet.send(signal.SIGKILL, "worker", 0)
        if not is_ending and done >= end_after and fleet.pid("worker", 0, 2) is not None:
            fleet.terminate()  # the stream ends, and with it the updates
            is_ending = True
    return done


def started(run_dir: Path, *options: str) -> RunningFleet:
    fleet = RunningFleet(run_dir, "--workers", "2", *OWN, *options)
    fleet.wait_until((run_dir / "broker.json").exists, "a broker")
    return fleet


@pytest.mark.thorough
def test_sac_trains_on_all_that_a_fleet_commits_though_a_worker_is_killed(tmp_path: Path) -> None:
    model = SAC("MlpPolicy", "Pendulum-v1", train_freq=8, learning_starts=200, device="cpu")
    options = ("--env", "Pendulum-v1", "--num-envs", "2", "--set", 'module.config.algorithm="SAC"')
    with started(tmp_path, *options, "--set", "sampling.rollout_fragment_length=16") as fleet:
        with (
            EpisodeStream.of(tmp_path, silence_timeout_s=2.0) as stream,
            WeightPublisher.of(tmp_path) as weights,
        ):
            steps = updates(model, stream, weights, total_timesteps=1_000_000)
            kill_a_worker_then_end(fleet, steps, kill_after=20, end_after=40)
            assert "stopped" in stream.ended
        result = fleet.finish()
        assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
        assert result["restarts"]["worker"] == 1
        assert result["ledger"]["committed"][0] == model.num_timesteps == model.replay_buffer.size()
        fleet.audited()
    assert model._n_updates == (model.num_timesteps - model.learning_starts) // 8


@pytest.mark.thorough
def test_ppo_trains_on_all_that_a_fleet_commits_though_a_worker_is_killed(tmp_path: Path) -> None:
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=512, n_epochs=2, device="cpu")
    before = {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}
    with started(
        tmp_path, "--env", "CartPole-v1", "--num-envs", "4", "--set", "sampling.rollout_fragment_length=32"
    ) as fleet:
        with (
            EpisodeStream.of(tmp_path, silence_timeout_s=2.0) as stream,
            WeightPublisher.of(tmp_path) as weights,
        ):
            steps = updates(model, stream, weights, total_timesteps=1_000_000)
            done = kill_a_worker_then_end(fleet, steps, kill_after=3, end_after=6)
            assert "stopped" in stream.ended
            assert weights.seq == done + 1
        result = fleet.finish()
        assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
        assert result["restarts"]["worker"] == 1
        assert result["ledger"]["committed"][0] == model.num_timesteps
        fleet.audited()
    assert any((tensor != before[name]).any() for name, tensor in model.policy.state_dict().items())
    assert np.mean([episode["r"] for episode in model.ep_info_buffer or ()]) > 8
