"""Stable-Baselines3's policies act in workers as in SB3, and its buffers get from chunks what SB3 would put there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from headrace.learner_stub.adapters import sb3
from headrace.learner_stub.checkpoints.checkpoint import load_checkpoint, published_arrays
from headrace.learner_stub.publishing.publisher import as_arrays, check_finite
from headrace.learner_stub.rollouts.connector_merger import ConnectorMerger
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import map_arrays
from headrace.schemas.chunks.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Spaces
from headrace.schemas.errors import ConfigError, ConnectorError, ModuleError, NotFiniteError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.connectors import MeanStd
from headrace.workers.modules.sb3 import as_module, build
from headrace.workers.policy.module_weights import write_weights
from headrace.workers.trained.trained_policy import TrainedPolicy

ENVS, STEPS = 4, 16
OBS = Box(shape=(4,), dtype="<f4")
ACTIONS: dict[str, Space] = {
    "discrete": Discrete(n=3),
    "multi_discrete": MultiDiscrete(nvec=(2, 3), start=(0, 0), shape=(2,)),
    "multi_binary": MultiBinary(shape=(3,)),
    "box": Box(shape=(2,), dtype="<f4", low=-1.0, high=1.0),
}


class CartOfParts(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole whose observations are a dict of two arrays."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(gym.make("CartPole-v1", **config))
        self.observation_space = gym.spaces.Dict(
            {"cart": gym.spaces.Box(-np.inf, np.inf, (2,)), "pole": gym.spaces.Box(-np.inf, np.inf, (2,))}
        )

    def observation(self, observation: NDArray[Any]) -> dict[str, NDArray[Any]]:
        return {"cart": observation[:2], "pole": observation[2:]}


class Replay(DummyVecEnv):
    """Lives through the steps of a batch again, whatever the actions. Env i is that of index i."""

    def __init__(self, make: Callable[[], gym.Env[Any, Any]], batch: ChunkBatch) -> None:
        super().__init__([make] * len(np.unique(batch.table["env_index"])))
        self.steps = batch.transitions()
        index = batch.table["env_index"][self.steps.chunk]
        self.rows = np.argsort(index, kind="stable").reshape(self.num_envs, -1)
        self.at = 0

    def _of(self, value: Any, rows: Any) -> Any:
        return {k: v[rows] for k, v in value.items()} if isinstance(value, dict) else value[rows]

    def reset(self) -> Any:
        return self._of(self.steps.obs, self.rows[:, 0])

    def step_wait(self) -> Any:
        rows, rewards = self.rows[:, self.at], self.steps.rewards[self.rows[:, self.at]].astype(np.float32)
        dones = (self.steps.terminated | self.steps.truncated)[rows]
        infos: list[dict[str, Any]] = [{} for _ in rows]
        for info, row, done in zip(infos, rows, dones, strict=True):
            if done:
                info["terminal_observation"] = self._of(self.steps.next_obs, row)
                info["TimeLimit.truncated"] = bool(self.steps.truncated[row])
        self.at += 1
        is_over = self.at == self.rows.shape[1]
        obs = self._of(self.steps.next_obs, rows) if is_over else self._of(self.steps.obs, self.rows[:, self.at])
        return obs, rewards, dones, infos


class Silent(BaseCallback):
    def _on_step(self) -> bool:
        return True


def by_hand(model: Any, make: Callable[[], gym.Env[Any, Any]], batch: ChunkBatch) -> RolloutBuffer:
    """The content of SB3's own buffer after `collect_rollouts` took the steps of `batch`."""
    replay = Replay(make, batch)

    def forward(obs: Any) -> Any:
        taken = torch.as_tensor(replay.steps.actions[replay.rows[:, replay.at]])
        values, logp, _ = model.policy.evaluate_actions(obs, taken)
        return taken, values, logp

    model.policy.forward = forward
    model.ep_info_buffer, model.ep_success_buffer = deque[Any](), deque[Any]()
    model._last_obs = replay.reset()
    model._last_episode_starts = batch.table["t_start"][replay.steps.chunk[replay.rows[:, 0]]] == 0
    callback = Silent()
    callback.init_callback(model)
    buffer: RolloutBuffer = model.rollout_buffer
    assert model.collect_rollouts(replay, callback, buffer, STEPS)
    del model.policy.forward
    return buffer


def make_cart() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1", max_episode_steps=12)


def make_pendulum() -> gym.Env[Any, Any]:
    return gym.make("Pendulum-v1", max_episode_steps=7)


def make_parts() -> gym.Env[Any, Any]:
    return CartOfParts({"max_episode_steps": 12})


@pytest.mark.parametrize(
    ("algorithm", "policy", "env", "limit", "make"),
    [
        (PPO, "MlpPolicy", "CartPole-v1", 12, make_cart),
        (A2C, "MlpPolicy", "Pendulum-v1", 7, make_pendulum),
        (PPO, "MultiInputPolicy", CartOfParts, 12, make_parts),
    ],
    ids=["cart", "pendulum", "dict"],
)
def test_the_rollout_buffer_holds_what_sb3_would_collect_from_the_same_steps(
    algorithm: Any, policy: str, env: Any, limit: int, make: Callable[[], gym.Env[Any, Any]]
) -> None:
    model = algorithm(policy, DummyVecEnv([make] * ENVS), n_steps=STEPS, gae_lambda=0.9, gamma=0.97, device="cpu")
    config = EnvRunnerConfig(
        env=env,
        env_config={"max_episode_steps": limit},
        num_envs=ENVS,
        seed=3,
        rollout_fragment_length=STEPS,
        module=lambda spaces: as_module(model.policy, spaces),
    )
    with SingleAgentEnvRunner(config) as runner:
        runner.sample()
        batch = runner.sample()  # its first chunks go on with episodes that began before
    steps = batch.transitions()
    assert steps.truncated.any()
    assert not (steps.truncated | steps.terminated)[steps.last].all(), "some chunks are cut"
    order = np.argsort(batch.table["env_index"][steps.chunk], kind="stable")

    assert sb3.fill(model, [batch]) == ENVS * STEPS
    mine = {name: array[0].copy() for name, array in arrays_of(model.rollout_buffer).items()}
    sb3._reshape(model.rollout_buffer, STEPS, ENVS)
    theirs = arrays_of(by_hand(model, make, batch))
    for name, array in theirs.items():
        expected = array.swapaxes(0, 1).reshape(-1, *array.shape[2:])
        np.testing.assert_allclose(mine[name][order], expected, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("algorithm", "env", "limit", "make"),
    [(DQN, "CartPole-v1", 12, make_cart), (SAC, "Pendulum-v1", 7, make_pendulum)],
    ids=["dqn", "sac"],
)
def test_the_replay_buffer_holds_what_sb3_would_collect_from_the_same_steps(
    algorithm: Any, env: Any, limit: int, make: Callable[[], gym.Env[Any, Any]]
) -> None:
    model = algorithm("MlpPolicy", make(), buffer_size=40, device="cpu")
    config = EnvRunnerConfig(
        env=env,
        env_config={"max_episode_steps": limit},
        seed=3,
        rollout_fragment_length=50,  # the buffer begins again after 40
        module=lambda spaces: as_module(model.policy, spaces),
    )
    with SingleAgentEnvRunner(config) as runner:
        batch = runner.sample()
    steps = batch.transitions()
    assert steps.truncated.any()
    sb3.store(model, batch.transitions())
    names = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
    mine = {name: getattr(model.replay_buffer, name).copy() for name in names}
    assert (model.replay_buffer.pos, model.replay_buffer.full) == (10, True)

    model.replay_buffer.reset()
    replay = Replay(make, batch)
    sent = steps.columns.get("actions_for_env", steps.actions)
    model._sample_action = lambda *_: (sent[replay.at : replay.at + 1], steps.actions[replay.at : replay.at + 1])
    model.ep_info_buffer, model.ep_success_buffer = deque[Any](), deque[Any]()
    model.set_logger(configure(None, []))
    model._total_timesteps = 50
    model._last_obs = replay.reset()
    callback = Silent()
    callback.init_callback(model)
    model.collect_rollouts(
        replay, callback, TrainFreq(50, TrainFrequencyUnit.STEP), model.replay_buffer, log_interval=None
    )
    for name in names:
        expected = getattr(model.replay_buffer, name)
        np.testing.assert_allclose(mine[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)
    if algorithm is SAC:
        np.testing.assert_allclose(model.policy.scale_action(sent), steps.actions, atol=1e-6)


class Counting(gym.Env[Any, Any]):
    """Episodes of 1 to 5 steps, which end in both ways; observations are a number, an array, or a dict of both."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._number, self._t = gym.spaces.Discrete(6), 0
        array = gym.spaces.Box(0.0, 6.0, (2,), np.float64)
        spaces = {"number": self._number, "dict": gym.spaces.Dict({"at": array, "t": self._number}), "array": array}
        self._kind, self.observation_space = config["kind"], spaces[config["kind"]]
        self.action_space = gym.spaces.Box(-1.0, 1.0, (3, 2), np.float64)

    def _observe(self) -> Any:
        array = np.full(2, self._t, np.float64)
        return {"number": self._t, "dict": {"at": array, "t": self._t}, "array": array}[self._kind]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t, self._length = 0, int(self.np_random.integers(1, 6))
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        is_over, is_even = self._t == self._length, self._length % 2 == 0
        return self._observe(), float(self.np_random.normal()), is_over and is_even, is_over and not is_even, {}


@pytest.mark.parametrize("timeouts", [True, False])
@pytest.mark.parametrize("kind", ["number", "dict", "array"])
def test_the_replay_buffer_is_to_the_bit_as_after_its_own_add_of_each_step(kind: str, timeouts: bool) -> None:
    config = EnvRunnerConfig(env=Counting, env_config={"kind": kind}, num_envs=3, seed=1)
    with SingleAgentEnvRunner(config) as runner:
        batches = [runner.sample(num_timesteps=steps, random_actions=True) for steps in (9, 21, 60, 12)]
    make = DictReplayBuffer if kind == "dict" else ReplayBuffer
    space = Counting({"kind": kind})
    mine, theirs = (
        make(30, space.observation_space, space.action_space, "cpu", handle_timeout_termination=timeouts)  # type: ignore[arg-type]
        for _ in range(2)
    )
    for batch in batches:  # the second fills the buffer to its last row, and the third is larger than it
        sb3.store(SimpleNamespace(replay_buffer=mine), batch.transitions())
        add_each(theirs, batch)
        assert (mine.pos, mine.full) == (theirs.pos, theirs.full)
        for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
            own, expected = (
                {"": part} if not isinstance(part, dict) else part
                for part in (getattr(mine, name), getattr(theirs, name))
            )
            assert {key: part.tobytes() for key, part in own.items()} == {
                key: part.tobytes() for key, part in expected.items()
            }, name
    assert mine.dones.any()
    assert mine.timeouts.any() == timeouts


def add_each(buffer: Any, batch: ChunkBatch) -> None:
    """Add the steps of `batch` one by one, as SB3 does after each step of an env."""
    steps = batch.transitions()
    for row in range(len(steps)):
        at = slice(row, row + 1)
        obs, after = (map_arrays(lambda rows: rows[at], value) for value in (steps.obs, steps.next_obs))  # noqa: B023
        done = (steps.terminated | steps.truncated)[at]
        infos = [{"TimeLimit.truncated": bool(steps.truncated[row])}]
        buffer.add(obs, after, steps.actions[at], steps.rewards[at], done, infos)


def arrays_of(buffer: Any) -> dict[str, Any]:
    names = ("actions", "rewards", "returns", "episode_starts", "values", "log_probs", "advantages")
    obs = buffer.observations
    parts = {f"obs/{key}": part for key, part in obs.items()} if isinstance(obs, dict) else {"obs": obs}
    return {name: getattr(buffer, name) for name in names} | parts


def made(kind: str) -> tuple[ActorCriticPolicy, Any]:
    torch.manual_seed(0)
    module: Any = build(Spaces(observation=OBS, action=ACTIONS[kind]), policy_kwargs={"net_arch": [8]})
    with torch.no_grad():
        module.policy.action_net.weight *= 100.0
    return module.policy, module


@pytest.mark.parametrize("kind", ACTIONS)
def test_sampled_actions_have_sb3s_own_log_probs_and_values(kind: str) -> None:
    policy, module = made(kind)
    rng = np.random.default_rng(0)
    obs = torch.from_numpy(rng.normal(size=(64, 4)).astype(np.float32))
    draw = rng.standard_normal if module.noise_kind == "normal" else rng.random
    answer = module.forward_exploration(
        {"obs": obs, "noise": torch.from_numpy(draw((64, module.noise_size), np.float32))}
    )
    values, logp, _ = policy.evaluate_actions(obs, answer["actions"])
    torch.testing.assert_close(answer["logp"], logp)
    torch.testing.assert_close(answer["values"], values[:, 0])
    best, _ = policy.predict(obs.numpy(), deterministic=True)
    inferred = module.forward_inference({"obs": obs})
    np.testing.assert_allclose(inferred.get("actions_for_env", inferred["actions"]), best, rtol=1e-6)
    if kind == "box":
        assert (answer["actions"].abs() > 1).any()
        torch.testing.assert_close(answer["actions_for_env"], answer["actions"].clamp(-1, 1))


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "multi_binary"])
def test_choices_are_sampled_with_the_policys_probabilities(kind: str) -> None:
    policy, module = made(kind)
    rows = 1000
    obs = torch.ones((rows, 4))
    noise = (torch.arange(rows)[:, None] + 0.5).expand(-1, module.noise_size) / rows
    actions = module.forward_exploration({"obs": obs, "noise": noise})["actions"].reshape(rows, -1)
    inner: Any = policy.get_distribution(obs[:1]).distribution
    if kind == "multi_binary":
        expected = [torch.stack((1 - p, p)) for p in inner.probs[0]]
    else:
        expected = [part.probs[0] for part in (inner if isinstance(inner, list) else [inner])]
    for column, probabilities in zip(actions.T, expected, strict=True):
        shares = torch.bincount(column.long(), minlength=len(probabilities)) / rows
        torch.testing.assert_close(shares, probabilities.detach(), rtol=0, atol=2 / rows)


EXPORTED: dict[str, tuple[str, Space, Space, dict[str, Any]]] = {
    **{f"ppo-{kind}": ("PPO", OBS, space, {}) for kind, space in ACTIONS.items()},
    "a2c-matrix": ("A2C", OBS, Box(shape=(2, 3), dtype="<f4", low=-1.0, high=1.0), {}),
    "ppo-apart": ("PPO", OBS, Discrete(n=3), {"policy_kwargs": {"share_features_extractor": False}}),
    "dqn": ("DQN", OBS, Discrete(n=3), {}),
    "sac": ("SAC", OBS, Box(shape=(2,), dtype="<f4", low=(-1.0, 0.0), high=(3.0, 10.0)), {}),
    "ppo-dict": ("PPO", Dict(spaces={"at": OBS, "n": Discrete(n=4)}), Discrete(n=3), {"policy": "MultiInputPolicy"}),
    "sac-dict": ("SAC", Dict(spaces={"at": OBS, "n": Discrete(n=4)}), ACTIONS["box"], {"policy": "MultiInputPolicy"}),
    "ppo-image": (
        "PPO",
        Box(shape=(3, 40, 40), dtype="|u1", low=0.0, high=255.0),
        Discrete(n=3),
        {"policy": "CnnPolicy"},
    ),
}


@pytest.mark.parametrize(
    "suffix",
    [".pt", pytest.param(".pt2", marks=pytest.mark.thorough), pytest.param(".onnx", marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize("case", EXPORTED)
def test_an_exported_policy_takes_sb3s_own_deterministic_actions(case: str, suffix: str, tmp_path: Path) -> None:
    algorithm, observation, action, options = EXPORTED[case]
    config = EnvRunnerConfig(env="CartPole-v1", module=build, module_config={"algorithm": algorithm, **options})
    spaces = Spaces(observation=observation, action=action)
    torch.manual_seed(0)
    policy = TrainedPolicy(config, {"default_policy": spaces}, {})
    module: Any = policy.module
    with torch.no_grad():
        for parameter in module.parameters():  # an untrained PPO's choices are nearly even
            parameter.mul_(3.0)
    written = policy.export_file(tmp_path / f"policy{suffix}")  # it compares the file with `act`
    assert "the largest difference from the policy's own actions is" in written.in_words()
    space = spaces.to_gymnasium()[0]
    seen: list[Any] = [space.sample() for _ in range(16)]
    is_dict = isinstance(seen[0], dict)
    batch = {name: np.stack([one[name] for one in seen]) for name in seen[0]} if is_dict else np.stack(seen)
    own = next(getattr(module, name) for name in ("policy", "q_net", "actor") if hasattr(module, name))
    np.testing.assert_allclose(policy.act(batch), own.predict(batch, deterministic=True)[0], rtol=1e-4, atol=1e-5)


def test_a_q_network_explores_at_the_rate_that_comes_with_its_weights() -> None:
    module: Any = build(Spaces(observation=OBS, action=Discrete(n=4)), algorithm="DQN")
    rows = 4000
    noise = np.random.default_rng(0).random((rows, 2), np.float32)
    batch = {"obs": torch.ones((rows, 4)), "noise": torch.from_numpy(noise)}
    best = int(module.forward_inference(batch)["actions"][0])
    for rate in (1.0, 0.4, 0.0):
        weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        write_weights(module, weights | {"exploration_rate": np.array(rate, np.float32)})
        shares = torch.bincount(module.forward_exploration(batch)["actions"], minlength=4) / rows
        expected = torch.full((4,), rate / 4)
        expected[best] += 1 - rate
        torch.testing.assert_close(shares, expected, rtol=0, atol=0.03)


def test_an_actor_samples_sacs_squashed_gaussian_and_maps_actions_back() -> None:
    bounds = Box(shape=(2,), dtype="<f4", low=(-1.0, 0.0), high=(3.0, 10.0))
    module: Any = build(Spaces(observation=OBS, action=bounds), algorithm="SAC")
    rng = np.random.default_rng(0)
    obs, noise = (torch.from_numpy(rng.standard_normal((32, n), np.float32)) for n in (4, 2))
    answer = module.forward_exploration({"obs": obs, "noise": noise})
    mean, log_std, _ = module.actor.get_action_dist_params(obs)
    torch.testing.assert_close(answer["actions"], torch.tanh(mean + log_std.exp() * noise).detach())
    unscaled = module.actor.unscale_action(answer["actions"].numpy())
    np.testing.assert_allclose(answer["actions_for_env"], unscaled, atol=1e-5)
    back = module.policy_actions({"actions": answer["actions_for_env"].numpy()})
    np.testing.assert_allclose(back["actions"], answer["actions"], atol=1e-6)
    best, _ = module.actor.predict(obs.numpy(), deterministic=True)
    np.testing.assert_allclose(module.forward_inference({"obs": obs})["actions_for_env"], best, atol=1e-5)


class Recorded(list[ChunkBatch]):
    """Batches in place of a stream."""

    def spaces(self) -> Spaces:
        return Spaces(observation=self[0].observation_space, action=self[0].action_space)


class NoFleet:
    """A publisher without workers."""

    def publish(self, state: dict[str, Any]) -> None:
        pass

    def log(self, figures: dict[str, float]) -> None:
        pass


@pytest.mark.parametrize("batch_steps", [8, 24, 10])
@pytest.mark.parametrize(
    "options",
    [
        {"train_freq": 32, "gradient_steps": 16, "learning_starts": 0},
        {"train_freq": 16, "gradient_steps": -1, "learning_starts": 0},
        {"train_freq": 32, "gradient_steps": 1, "learning_starts": 64},
        {"train_freq": 1, "gradient_steps": 1, "learning_starts": 20},
        {"train_freq": 3, "gradient_steps": 0, "learning_starts": 20},
    ],
    ids=["16-every-32", "as-many-as-steps", "late", "1-every-1", "none"],
)
def test_dqn_trains_after_the_same_steps_as_by_itself_whatever_the_size_of_batches(
    options: dict[str, Any], batch_steps: int
) -> None:
    trained: dict[str, list[tuple[int, int, int]]] = {"alone": [], "fleet": []}
    models = {name: DQN("MlpPolicy", make_cart(), buffer_size=200, device="cpu", **options) for name in trained}

    def note(name: str, gradient_steps: int, batch_size: int) -> None:
        replay: Any = models[name].replay_buffer
        trained[name].append((models[name].num_timesteps, gradient_steps, replay.size()))

    for name, model in models.items():
        vars(model)["train"] = partial(note, name)
    models["alone"].learn(120)
    with SingleAgentEnvRunner(EnvRunnerConfig(env="CartPole-v1", num_envs=1, seed=0)) as runner:
        batches = Recorded(runner.sample(num_timesteps=batch_steps) for _ in range(120 // batch_steps))
    assert trained_on(models["fleet"], batches, 120) == list(range(batch_steps, 121, batch_steps))
    assert trained["fleet"] == [row for row in trained["alone"] if row[0] <= 120]
    assert bool(trained["fleet"]) == bool(options["gradient_steps"])


@pytest.mark.parametrize(
    ("gradient_steps", "due"), [(5, lambda steps, ends: 5 * (ends // 2)), (-1, lambda steps, _: steps)]
)
def test_dqn_trains_for_each_so_many_episodes(gradient_steps: int, due: Callable[[int, int], int]) -> None:
    options: dict[str, Any] = {"train_freq": (2, "episode"), "gradient_steps": gradient_steps, "learning_starts": 0}
    model, trained = DQN("MlpPolicy", make_cart(), buffer_size=300, device="cpu", **options), [0]
    vars(model)["train"] = lambda gradient_steps, batch_size: trained.append(gradient_steps)
    with SingleAgentEnvRunner(EnvRunnerConfig(env="CartPole-v1", num_envs=1, seed=0)) as runner:
        batches = Recorded(runner.sample(num_episodes=2) for _ in range(3))
    trained_on(model, batches, 10**6)
    assert sum(trained) == due(model.num_timesteps, 6)


def test_the_module_takes_the_weights_by_their_names_in_sb3() -> None:
    _, module = made("discrete")
    other: Any = build(Spaces(observation=OBS, action=ACTIONS["discrete"]), policy_kwargs={"net_arch": [8]})
    write_weights(other, {name: tensor.numpy() for name, tensor in module.policy.state_dict().items()})
    for name, tensor in other.policy.state_dict().items():
        torch.testing.assert_close(tensor, module.policy.state_dict()[name])


def test_a_policy_that_cannot_act_in_workers_is_refused() -> None:
    spaces = Spaces(observation=OBS, action=ACTIONS["discrete"])
    with pytest.raises(ModuleError, match=r"no policy 'LstmPolicy' of 'PPO'.*it has \['CnnPolicy', 'MlpPolicy'"):
        build(spaces, policy="LstmPolicy")
    with pytest.raises(ModuleError, match="no such algorithm"):
        build(spaces, algorithm="XYZ")
    box = Spaces(observation=OBS, action=ACTIONS["box"])
    with pytest.raises(ModuleError, match="without gSDE"):
        build(box, policy_kwargs={"use_sde": True})
    with pytest.raises(ModuleError, match="TD3Policy of Stable-Baselines3 cannot act"):
        build(box, algorithm="TD3")
    with pytest.raises(ModuleError, match=r"has the action space Discrete\(3\), and the fleet's is Box"):
        as_module(made("discrete")[0], box)
    from_one = Spaces(observation=OBS, action=Discrete(n=3, start=1))
    with pytest.raises(ModuleError, match=r"counts actions from 0, and actions of the env are Discrete\(3, start=1\)"):
        build(from_one)
    seen = Dict(spaces={"at": OBS, "place": Discrete(n=7, start=2)})
    with pytest.raises(ModuleError, match="counts observations from 0, and observations/place of the env"):
        build(Spaces(observation=seen, action=Discrete(n=3)), policy="MultiInputPolicy")
    image = Box(shape=(40, 40, 3), dtype="|u1", low=0.0, high=255.0)
    with pytest.raises(
        ModuleError, match=r"the channels first, and observations of the env are of shape \(40, 40, 3\)"
    ):
        build(Spaces(observation=image, action=Discrete(n=3)), policy="CnnPolicy")


class OwnBuffer(RolloutBuffer):
    pass


def test_a_model_whose_buffer_is_not_sb3s_own_or_that_normalises_by_itself_is_refused() -> None:
    own = PPO("MlpPolicy", make_cart(), n_steps=8, batch_size=8, rollout_buffer_class=OwnBuffer, device="cpu")
    several = DQN("MlpPolicy", DummyVecEnv([make_cart] * 2), buffer_size=40, device="cpu")
    with pytest.raises(ModuleError, match="this DQN must be built with one env"):
        sb3._check(several, None)  # type: ignore[arg-type]
    n_steps = DQN("MlpPolicy", make_cart(), buffer_size=40, n_steps=3, device="cpu")
    with pytest.raises(ModuleError, match="DQN has a NStepReplayBuffer"):
        sb3._check(n_steps, None)  # type: ignore[arg-type]
    with pytest.raises(ModuleError, match="PPO has a OwnBuffer"):
        sb3._check(own, None)  # type: ignore[arg-type]
    normalised = PPO("MlpPolicy", VecNormalize(DummyVecEnv([make_cart])), n_steps=8, batch_size=8, device="cpu")
    with pytest.raises(ModuleError, match="MeanStd"):
        sb3._check(normalised, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (TD3, {"buffer_size": 40}),
        (DDPG, {"buffer_size": 40}),
        (SAC, {"buffer_size": 40, "use_sde": True}),
        (PPO, {"n_steps": 8, "batch_size": 8, "use_sde": True}),
    ],
    ids=["td3", "ddpg", "sac-gsde", "ppo-gsde"],
)
def test_a_model_that_explores_in_a_way_that_workers_lack_is_refused(algorithm: Any, options: dict[str, Any]) -> None:
    model = algorithm("MlpPolicy", make_pendulum(), device="cpu", **options)
    with pytest.raises(ModuleError, match=f"this {algorithm.__name__} cannot act in workers: .* without gSDE"):
        sb3._check(model, None)  # type: ignore[arg-type]


def recorded(env: str, **options: Any) -> Recorded:
    """Sixteen batches of 8 steps, by a policy of SB3."""
    module = partial(build, **options)
    with SingleAgentEnvRunner(EnvRunnerConfig(env=env, num_envs=1, seed=0, module=module)) as runner:
        return Recorded(runner.sample(num_timesteps=8) for _ in range(16))


def test_no_step_is_taken_for_a_model_that_has_had_them_all() -> None:
    batches, model = recorded("CartPole-v1"), PPO("MlpPolicy", make_cart(), n_steps=8, batch_size=8, device="cpu")
    [*_, last] = trained_on(model, batches, 64)
    assert last == model.num_timesteps == 64
    assert trained_on(model, batches, 64) == []
    assert model.num_timesteps == 64
    with pytest.raises(ConfigError, match="0 is no number of steps to train on"):
        trained_on(model, batches, 0)


def test_a_model_that_a_fleet_has_trained_goes_on_by_itself() -> None:
    model = PPO("MlpPolicy", make_cart(), n_steps=8, batch_size=8, n_epochs=1, device="cpu")
    trained_on(model, recorded("CartPole-v1"), 64)
    model.learn(32, reset_num_timesteps=False)
    assert model.num_timesteps == 96


def trained_on(model: Any, batches: Recorded, total_timesteps: int) -> list[int]:
    return list(sb3.updates(model, cast(Any, batches), cast(Any, NoFleet()), total_timesteps))


@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_what_connectors_learn_is_published_and_saved(algorithm: Any, tmp_path: Path) -> None:
    module = partial(build, algorithm=algorithm.__name__)
    config = EnvRunnerConfig(env="Pendulum-v1", num_envs=1, seed=0, module=module, env_to_module=[MeanStd])
    with SingleAgentEnvRunner(config) as runner:
        batches: Any = Recorded(runner.sample_fragment() for _ in range(3))
        space = runner.spaces.to_gymnasium()[0]
    model = algorithm("MlpPolicy", gym.wrappers.TransformObservation(make_pendulum(), np.float32, space), device="cpu")
    counts: list[int] = []

    def publish(state: dict[str, Any]) -> None:
        counts.append(int(state.get("connectors/env_to_module/0.MeanStd/obs/count", [0])[0]))

    fleet: Any = SimpleNamespace(publish=publish, log=lambda figures: None)
    merger = ConnectorMerger(env_to_module=[MeanStd])
    list(sb3.updates(model, batches, fleet, 10**6, merger))
    seen = int(merger.get_state()["connectors/env_to_module/0.MeanStd/obs/count"][0])
    assert (counts[0], counts[-1]) == (0, seen)
    assert seen > sum(batch.steps for batch in batches)
    saved = published_arrays(load_checkpoint(sb3.save_sb3_policy(tmp_path, model, merger)).arrays)  # type: ignore[union-attr]
    assert {name: saved[name].tolist() for name in merger.get_state()} == {
        name: array.tolist() for name, array in merger.get_state().items()
    }
    with pytest.raises(ConnectorError, match="give workers and learner the same ones"):
        list(sb3.updates(model, batches, fleet, 10**7))


@pytest.mark.parametrize("algorithm", [PPO, A2C, DQN, SAC])
def test_what_the_adapter_saves_of_a_model_acts(algorithm: Any, tmp_path: Path) -> None:
    env = "Pendulum-v1" if algorithm is SAC else "CartPole-v1"
    model = algorithm("MlpPolicy", env, device="cpu")
    arrays = published_arrays(load_checkpoint(sb3.save_sb3_policy(tmp_path, model)).arrays)  # type: ignore[union-attr]
    config = EnvRunnerConfig(
        env=env, module="headrace.workers.modules.sb3:build", module_config={"algorithm": algorithm.__name__}
    )
    with SingleAgentEnvRunner(config) as runner:
        runner.set_weights(arrays, 1)
        assert runner.sample(num_timesteps=4, explore=False)


def test_a_model_whose_weights_become_nan_is_not_published_and_its_loss_is_logged() -> None:
    model = PPO("MlpPolicy", "CartPole-v1", device="cpu")
    model.set_logger(sb3._Figures())
    model.logger.record("train/loss", float("nan"))
    logged: list[Any] = []

    def refuse(state: Any) -> None:
        check_finite(as_arrays(state))

    fleet = SimpleNamespace(publish=refuse, log=logged.append)
    with torch.no_grad():
        next(model.policy.parameters()).fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="lower learning rate"):
        sb3._tell(model, cast(Any, fleet), ConnectorMerger())
    assert [list(row) for row in logged] == [["train/loss"]]


@pytest.mark.parametrize("activation", [torch.nn.Tanh, torch.nn.ReLU])
def test_a_model_whose_policy_only_behaves_otherwise_than_the_workers_is_refused(activation: Any) -> None:
    model = PPO(
        "MlpPolicy",
        "CartPole-v1",
        n_steps=32,
        batch_size=32,
        policy_kwargs={"activation_fn": activation},
        device="cpu",
    )
    config = EnvRunnerConfig(env="CartPole-v1", num_envs=2, seed=0, module=build)
    with SingleAgentEnvRunner(config) as runner:
        runner.set_weights(model.policy.state_dict(), seq=1, learner_epoch=3)
        batches = Recorded([runner.sample(num_timesteps=32)])
    fleet = SimpleNamespace(epoch=3, publish=lambda state: 1, log=lambda figures: None)
    trained = sb3.updates(model, cast(Any, batches), cast(Any, fleet), 32)
    if activation is torch.nn.Tanh:
        assert list(trained)
        return
    with pytest.raises(ModuleError, match="activation_fn"):
        list(trained)
