"""Steps of each library's own loop over its envs, for the arms "... alone" of `bench.adapters`.

Each trains by the same update as the arm beside it, with batches of the same size, and without a fleet. It returns env
steps and the mean return of the newest 100 episodes, at the mark or after `MOST_STEPS`.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from bench.adapter_learners import RLlibLearner, Settings, TorchPPO, TorchRLPPO, Watch
from headrace.workers.envs.spaces import spaces_of
from headrace.workers.modules import actor_critic

MOST_STEPS = 500_000
UNWATCHED = Watch(lambda: None, 0)
_COLUMNS = ("obs", "actions", "logp", "next_obs", "rewards", "terminated", "last")


@dataclass(frozen=True, slots=True)
class Loop:
    """An env, and how many steps of how many of it one update takes."""

    env: str
    num_envs: int
    length: int
    settings: Settings
    seed: int
    mark: float

    @property
    def batch(self) -> int:
        """Return the steps of one update."""
        return self.num_envs * self.length


def made(env: str) -> Any:
    """Make an env with its returns in infos; actions of a Box are in [-1, 1], clipped."""
    own = gym.wrappers.RecordEpisodeStatistics(gym.make(env))
    if isinstance(own.action_space, gym.spaces.Box):
        return gym.wrappers.ClipAction(gym.wrappers.RescaleAction(own, -1.0, 1.0))
    return own


def made_of(env_config: Mapping[str, Any]) -> Any:
    """Make the env of this configuration's `env`, in a process of envs."""
    return made(env_config["env"])


class Newest:
    """Returns of the newest 100 episodes."""

    def __init__(self) -> None:
        self._returns: deque[float] = deque(maxlen=100)

    def add(self, returns: Any) -> None:
        """Note the returns of some episodes."""
        self._returns.extend(map(float, returns))

    @property
    def mean(self) -> float:
        """Return their mean; -inf before there are 100."""
        return float(np.mean(self._returns)) if len(self._returns) == 100 else -np.inf


def own_vector(loop: Loop) -> Any:
    """Make gymnasium's own vector."""
    return gym.vector.SyncVectorEnv(
        [lambda: made(loop.env)] * loop.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )


def torch_loop(loop: Loop, vector: Callable[[Loop], Any] = own_vector, watch: Watch = UNWATCHED) -> tuple[int, float]:
    """Train `TorchPPO` on a vector of gymnasium's kind."""
    envs = vector(loop)
    module = actor_critic(spaces_of(gym.make(loop.env)), vf_share_layers=False, seed=loop.seed)
    noise = torch.randn if module.noise_kind == "normal" else torch.rand
    update, newest = TorchPPO(loop.settings, watch), Newest()
    obs, _ = envs.reset(seed=loop.seed)
    for steps in itertools.count(loop.batch, loop.batch):
        rows: dict[str, list[Any]] = defaultdict(list)
        for step in range(loop.length):
            seen = {"obs": torch.from_numpy(obs.copy()), "noise": noise(loop.num_envs, module.noise_size)}
            answer = module.forward_exploration(seen)
            obs, rewards, terminated, truncated, infos = envs.step(answer["actions"].numpy())
            ends, after = terminated | truncated, obs.copy()
            for i in np.flatnonzero(ends):
                after[i] = infos["final_obs"][i]
            told = infos.get("final_info", {})
            for i in np.flatnonzero(told.get("_episode", ())):  # a lost env tells no return
                newest.add([told["episode"]["r"][i]])
            last = ends | (step == loop.length - 1)
            values = seen["obs"], answer["actions"], answer["logp"], after, rewards, terminated, last
            for name, value in zip(_COLUMNS, values, strict=True):
                rows[name].append(torch.as_tensor(value))
        # Of one env after the other, in time order.
        whole = {name: torch.stack(parts, 1).flatten(0, 1) for name, parts in rows.items()}
        update(module, _Steps(**whole, columns={"logp": whole["logp"]}))
        if newest.mean >= loop.mark or steps >= MOST_STEPS:
            envs.close()
            return steps, newest.mean
    raise AssertionError


class _Steps(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.obs)


def torchrl_collector(loop: Loop) -> tuple[int, float]:
    """Train `TorchRLPPO` on TorchRL's collector."""
    from torchrl.collectors import Collector
    from torchrl.envs import GymWrapper, RewardSum, SerialEnv, TransformedEnv

    def env() -> Any:
        return GymWrapper(made(loop.env), categorical_action_encoding=True)

    module = actor_critic(spaces_of(gym.make(loop.env)), vf_share_layers=False, seed=loop.seed)
    update, newest = TorchRLPPO(loop.settings, UNWATCHED), Newest()
    envs = TransformedEnv(SerialEnv(loop.num_envs, env), RewardSum())
    envs.set_seed(loop.seed)
    collector = Collector(
        envs, update.actor(module), frames_per_batch=loop.batch, total_frames=MOST_STEPS, trust_policy=True
    )
    steps = 0
    for batch in collector:
        steps += loop.batch
        following = batch["next"]
        newest.add(following["episode_reward"][following["done"]])
        following["truncated"][:, -1] = ~following["terminated"][:, -1]  # as `set_truncated`, which hides real ends
        following["done"][:, -1] = True
        update(module, batch.reshape(-1))
        if newest.mean >= loop.mark:
            break
    collector.shutdown()
    return steps, newest.mean


def rllib_runner(loop: Loop) -> tuple[int, float]:
    """Train `RLlibLearner` on RLlib's env runner."""
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    with tempfile.TemporaryDirectory() as folder:
        learner = RLlibLearner(loop.settings, loop.env, Path(folder) / "policy.npz")
    config = learner.config.copy(copy_frozen=False).debugging(seed=loop.seed)
    config.env_runners(num_envs_per_env_runner=loop.num_envs, rollout_fragment_length=loop.length)
    runner = SingleAgentEnvRunner(config=config)
    learner.watch, newest = UNWATCHED, Newest()
    returns: dict[str, float] = defaultdict(float)
    steps = 0
    while newest.mean < loop.mark and steps < MOST_STEPS:
        runner.set_state({"rl_module": learner.state()})
        episodes = runner.sample(num_timesteps=loop.batch)
        for episode in episodes:
            steps += len(episode)
            returns[episode.id_] += episode.get_return()
            if episode.is_done:
                newest.add([returns.pop(episode.id_)])
        learner.train(episodes)
    runner.stop()
    return steps, newest.mean
