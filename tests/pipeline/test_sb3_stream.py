"""The adapter of Stable-Baselines3 refuses a fleet that does not fit its model, and nothing is lost by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from stable_baselines3 import DQN, PPO

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.adapters.sb3 import updates
from headrace.schemas.errors import ModuleError, WeightsMismatchError
from support.pipeline.delivery import BrokerThread, Envs, StartFeeder, batches_of
from support.pipeline.worker_threads import SAMPLING, WorkerThread


class Blank(gym.Env[Any, Any]):
    """Only spaces: a model needs no more of its env here."""

    def __init__(self, actions: int) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (1,))
        self.action_space = gym.spaces.Discrete(actions)


def model_of(actions: int) -> PPO:
    return PPO("MlpPolicy", Blank(actions), n_steps=8, batch_size=8, device="cpu")


@pytest.mark.parametrize(
    ("actions", "error"),
    [
        (3, r"this PPO has the action space Discrete\(3\), and the fleet's is Discrete\(2\)"),
        (2, r"no column 'logp'.*headrace\.workers\.modules\.sb3:build"),
    ],
    ids=["another-action-space", "another-module"],
)
def test_a_model_that_does_not_fit_is_refused_and_the_next_learner_gets_every_step(
    broker: BrokerThread, start_feeder: StartFeeder, actions: int, error: str
) -> None:
    feeder = start_feeder(broker.endpoints.worker, Envs().fragments(5))
    at = broker.endpoints.learner
    with (
        pytest.raises(ModuleError, match=error),
        EpisodeStream(at, auto_commit=False) as stream,
        WeightPublisher(at) as weights,
    ):
        next(updates(model_of(actions), stream, weights, total_timesteps=100))
    with EpisodeStream(at) as stream:
        seen = sum(batch.steps for batch in batches_of(stream, feeder.all_settled))
    assert seen == sum(feeder.steps.values())


def test_weights_that_the_workers_module_cannot_load_are_refused_by_their_names(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at = broker.endpoints.learner
    worker = WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, {"sampling": SAMPLING})
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
    with worker, EpisodeStream(at) as stream, WeightPublisher(at) as weights:
        with pytest.raises(WeightsMismatchError, match="action_net"):
            next(updates(model, stream, weights, total_timesteps=100))
        worker.check()
        assert stream.next(0.0) is None, "a worker without weights samples nothing"


def test_dqn_trains_on_each_step_that_comes_and_sets_the_workers_rate_of_exploration(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at = broker.endpoints.learner
    module = {"build": "headrace.workers.modules.sb3:build", "config": {"algorithm": "DQN"}}
    worker = WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, {"sampling": SAMPLING, "module": module})
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_starts=70,
        target_update_interval=100,
        exploration_fraction=0.5,
        exploration_final_eps=0.1,
        device="cpu",
    )
    target = model.q_net_target.state_dict()["q_net.0.weight"].clone()
    published: list[dict[str, Any]] = []
    logged: dict[str, float] = {}
    with worker, EpisodeStream(at) as stream, WeightPublisher(at) as weights:
        publish = weights.publish
        monkeypatch.setattr(weights, "publish", lambda state: published.append(dict(state)) or publish(state))
        monkeypatch.setattr(weights, "log", logged.update)
        *_, last = updates(model, stream, weights, total_timesteps=320)
        worker.check()
    assert last == model.num_timesteps >= 320
    assert model.replay_buffer is not None
    assert model.replay_buffer.size() == last
    assert model._n_updates == last // 4 - 70 // 4, "one at each fourth step, after the first 70"
    assert (model.q_net_target.state_dict()["q_net.0.weight"] != target).any()
    assert logged["train/loss"] > 0
    rates = [float(state["exploration_rate"]) for state in published]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert model.ep_info_buffer
