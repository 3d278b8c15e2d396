"""The default actor-critic on every kind of space, and modules of a user's own."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.schemas.chunks.spaces import Discrete, Spaces, nest
from headrace.schemas.errors import (
    ConnectorError,
    EnvRestartBudgetError,
    ModuleError,
    NotFiniteError,
    WeightsMismatchError,
)
from headrace.workers.connectors.connector import Connector
from headrace.workers.envs import restarts
from headrace.workers.envs.bounds import ActionLimits
from headrace.workers.envs.spaces import convert
from headrace.workers.modules import actor_critic
from headrace.workers.modules.actor_critic import ActorCritic
from headrace.workers.policy.acting import Actor
from headrace.workers.policy.module_weights import read_weights, write_weights
from support.envs.toy import Counting, Faulty, Walk, diverge, runner, with_fault
from support.runners.recurrent import LSTM

WITH = "^with weights version 7 of learner epoch 1"
FLOAT8_E8M0FNU = getattr(torch, "float8_e8m0fnu", torch.bfloat16)
"""A dtype of numbers beyond those of float16. Torch has it from 2.7 on."""
ACTIONS = [
    gym.spaces.Discrete(4, start=2),
    gym.spaces.MultiDiscrete([2, 3, 4], start=[0, 1, 2]),
    gym.spaces.MultiBinary(3),
    gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, np.inf], np.float32)),
    gym.spaces.Box(0, 9, (2,), np.int32),
    gym.spaces.Dict({"grip": gym.spaces.Discrete(2), "arm": gym.spaces.Tuple((gym.spaces.Box(-1.0, 1.0, (2,)),))}),
]
OBSERVATIONS = [
    gym.spaces.Box(-np.inf, np.inf, (4,), np.float32),
    gym.spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    gym.spaces.Discrete(5, start=1),
    gym.spaces.Box(0, 255, (17, 12, 3), np.uint8),
    gym.spaces.Box(0.0, 1.0, (1, 9, 9), np.float32),
    gym.spaces.Dict(
        {"pixels": gym.spaces.Box(0, 255, (8, 8, 1), np.uint8), "more": gym.spaces.Tuple((gym.spaces.MultiBinary(2),
         gym.spaces.MultiDiscrete([2, 3])))}
    ),
]  # fmt: skip


def _env(observation: gym.Space[Any], action: gym.Space[Any]) -> type[Counting]:
    class Sampled(Counting):
        observation_space = observation
        action_space = action

        def reset(self, **kwargs: Any) -> Any:
            self.observation_space.seed(0)
            return super().reset(**kwargs)

        def observe(self) -> Any:
            return self.observation_space.sample()

        def step(self, chosen: Any) -> Any:
            assert self.action_space.contains(chosen), chosen
            return super().step(chosen)

    return Sampled


@pytest.mark.parametrize("observation", OBSERVATIONS, ids=str)
@pytest.mark.parametrize("action", ACTIONS, ids=str)
def test_default_policy_acts_in_any_space_and_a_learner_recomputes_its_numbers(
    observation: gym.Space[Any], action: gym.Space[Any]
) -> None:
    with runner(_env(observation, action), num_envs=3, restart_failed_sub_environments=False) as sampler:
        batch = sampler.sample(num_timesteps=24)
        module: Any = sampler.module
        spaces = sampler.spaces
    for chunk in batch:
        obs = _tensors(spaces.observation, chunk.obs, len(chunk))
        again = module.forward_train({"obs": obs})
        inputs = torch.from_numpy(chunk.columns["action_dist_inputs"])
        torch.testing.assert_close(again["action_dist_inputs"], inputs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(again["values"], torch.from_numpy(chunk.columns["values"]), rtol=1e-4, atol=1e-5)
        logp = module.logp(again["action_dist_inputs"], chunk.actions)
        torch.testing.assert_close(logp, torch.from_numpy(chunk.columns["logp"]), rtol=1e-4, atol=1e-4)
        assert module.entropy(again["action_dist_inputs"]).shape == (len(chunk),)


def _tensors(space: Any, value: Any, rows: int) -> Any:
    if isinstance(value, dict):
        return {k: _tensors(None, v, rows) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_tensors(None, v, rows) for v in value)
    return torch.from_numpy(np.ascontiguousarray(value[:rows]))


@pytest.mark.parametrize("module", ["headrace.workers.modules:actor_critic", LSTM])
def test_a_module_acts_on_the_cpu_even_if_the_machine_has_an_accelerator(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("is_available", "device_count", "current_device", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name) or 1)
    devices: set[str] = set()

    def note(own: Any, args: Any, kwargs: Any) -> None:
        seen = [*args, *kwargs.values()]
        while seen:
            value = seen.pop()
            if isinstance(value, torch.Tensor):
                devices.add(value.device.type)
            elif isinstance(value, dict | list | tuple):
                seen += value.values() if isinstance(value, dict) else value

    with runner("CartPole-v1", module=module, module_config={"hidden": (8,)}) as sampler:
        policy: Any = sampler.module
        for part in policy.modules():
            part.register_forward_pre_hook(note, with_kwargs=True)
        sampler.sample(num_timesteps=8)
        devices |= {tensor.device.type for tensor in policy.state_dict().values()}
    assert devices == {"cpu"}
    assert asked == []


def _spaces(action: gym.Space[Any] = ACTIONS[0], dtype: type = np.float32) -> Spaces:
    observation = gym.spaces.Box(-np.inf, np.inf, (4,), dtype)
    return Spaces(observation=convert(observation, ""), action=convert(action, ""))


@pytest.mark.parametrize("action", ACTIONS, ids=str)
@pytest.mark.parametrize("config", [{}, {"activation": "relu"}, {"vf_share_layers": False}, {"hidden": ()}], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_give_the_same_actions_as_tensors(action: gym.Space[Any], config: dict[str, Any], dtype: type) -> None:
    spaces = _spaces(action, dtype)
    module = actor_critic(spaces, **config)
    obs = np.random.default_rng(0).normal(size=(16, 4)).astype(dtype)
    noise = np.random.default_rng(1).random((16, module.noise_size), np.float32)
    fast = module.numpy_act()({"obs": obs}, noise)
    slow = module.forward_exploration({"obs": torch.from_numpy(obs), "noise": torch.from_numpy(noise)})
    for name in ("logp", "values", "action_dist_inputs"):
        np.testing.assert_allclose(fast[name], slow[name].numpy(), rtol=1e-5, atol=1e-6)
    for value, other in zip(_flat(nest(spaces.action, fast, "actions")), _flat(slow["actions"]), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


class TorchCalls(TorchDispatchMode):
    """The number of torch's operations in a `with` block."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("action", [gym.spaces.Discrete(3), gym.spaces.Box(-1.0, 1.0, (6,))], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_small_policy_of_vectors_of_floats_acts_without_torch(action: gym.Space[Any], dtype: type) -> None:
    module = actor_critic(_spaces(action, dtype))
    obs, noise = np.ones((2, 4), dtype), np.full((2, module.noise_size), 0.5, np.float32)
    with TorchCalls() as by_tensors:
        module.forward_exploration({"obs": torch.from_numpy(obs), "noise": torch.from_numpy(noise)})
    act = module.numpy_act()
    with TorchCalls() as by_arrays:
        act({"obs": obs}, noise)
        act({"obs": obs}, None)
    assert by_tensors.count > 0
    assert by_arrays.count == 0


def test_a_row_gets_the_same_action_alone_and_in_a_batch() -> None:
    random = np.random.default_rng(0)
    distribution = actor_critic(_spaces(gym.spaces.Discrete(5))).distribution
    logits = (random.normal(size=(300, 5)) * 8).astype(np.float32)
    logits[::7, 2] = -1e9
    noise = random.random((300, 1), np.float32)
    noise[::5], noise[1::5] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    for numbers in (noise, None):
        together = distribution.act(logits, numbers)
        for row in range(len(logits)):
            alone = distribution.act(logits[row : row + 1], None if numbers is None else numbers[row : row + 1])
            mass = np.exp(logits[row] - logits[row].max()).cumsum()
            picked = (
                logits[row].argmax() if numbers is None else np.searchsorted(mass, numbers[row] * mass[-1], "right")
            )
            assert together["actions"][row] == alone["actions"][0] == picked
            assert together["logp"][row].tobytes() == alone["logp"].tobytes()


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in _flat(v)]
    return [x for v in value for x in _flat(v)] if isinstance(value, tuple) else [np.asarray(value)]


def test_samples_follow_the_distribution() -> None:
    module = actor_critic(_spaces(gym.spaces.Discrete(3)))
    logits = np.tile(np.log(np.array([0.2, 0.5, 0.3], np.float32)), (20_000, 1))
    noise = np.random.default_rng(0).random((20_000, 1), np.float32)
    counts = np.bincount(module.distribution.act(logits, noise)["actions"]) / 20_000
    np.testing.assert_allclose(counts, [0.2, 0.5, 0.3], atol=0.02)


def test_an_impossible_action_is_never_taken() -> None:
    module = actor_critic(_spaces(gym.spaces.Discrete(3)))
    edge = np.array([[0.0], [np.nextafter(np.float32(1), np.float32(0))]], np.float32)
    for logits in ([-np.inf, 0.3, -np.inf], [-np.inf, 1.7, 2.1], [0.7, 0.7, -np.inf]):
        rows = np.array([logits, logits], np.float32)
        actions = module.distribution.act(rows, edge)["actions"]
        assert np.isfinite(rows[[0, 1], actions]).all()


def test_the_env_gets_the_scaled_clipped_action_and_the_learner_the_raw_action() -> None:
    env = _env(OBSERVATIONS[0], gym.spaces.Box(np.array([2.0], np.float32), np.array([6.0], np.float32)))
    with runner(env, num_envs=4, module_config={"log_std": 1.0}) as sampler:
        for c in sampler.sample(num_timesteps=40):
            expected = np.clip(4 + 2 * c.actions, 2, 6)
            np.testing.assert_allclose(c.columns["actions_for_env"], expected, rtol=1e-6)


def test_first_weights_depend_on_the_seed_alone() -> None:
    weights = []
    for seed, global_seed in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(global_seed)
        weights.append(read_weights(actor_critic(_spaces(), seed=seed)))
    assert all(np.array_equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert not all(np.array_equal(weights[0][k], weights[2][k]) for k in weights[0])


@pytest.mark.long
def test_building_a_module_imports_neither_sympy_nor_torch_dynamo() -> None:
    """Each worker, learner and server builds modules at its start. Building on "meta" tensors would import sympy."""
    script = """
import sys
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.workers.modules import actor_critic, lstm_actor_critic
pixels = Box(low=0.0, high=255.0, shape=(8, 8, 1), dtype="|u1")
for build in (actor_critic, lstm_actor_critic):
    build(Spaces(observation=pixels, action=Discrete(n=2)))
print(sorted({"sympy", "torch._dynamo"} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


def test_write_weights_copies_once_and_gives_the_same_bytes_as_torch() -> None:
    rng = np.random.default_rng(0)
    module, twin = torch.nn.Module(), torch.nn.Module()
    given: dict[str, np.ndarray[Any, Any]] = {"steps": np.array(7), "converted": rng.standard_normal(5)}
    given |= {
        str(dtype): rng.standard_normal((500, 100)).astype(dtype) for dtype in ("<f4", "<f8", "<i8", "|b1", "<f2")
    }
    for name, array in given.items():
        array.flags.writeable = False
        dtype = torch.float32 if name == "converted" else torch.from_numpy(array.copy()).dtype
        for either in (module, twin):
            either.register_buffer(name.replace("<", "_"), torch.zeros(array.shape, dtype=dtype))
    given = {name.replace("<", "_"): array for name, array in given.items()}
    write_weights(module, given)
    with torch.no_grad():
        for name, tensor in twin.state_dict().items():
            tensor.copy_(torch.from_numpy(given[name].copy()))
    for name, tensor in module.state_dict().items():
        assert tensor.numpy().tobytes() == twin.state_dict()[name].numpy().tobytes(), name
    module, large = torch.nn.Module(), {"w": np.ones(1_000_000, np.float32)}
    module.register_buffer("w", torch.zeros(1_000_000))
    tracemalloc.start()
    try:
        write_weights(module, large)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000, "no copy beside the module's own memory"


def test_write_weights_reads_the_state_dict_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = torch.nn.Linear(3, 2), list[str]()
    read = torch.nn.Module.state_dict

    def counted(self: torch.nn.Module, *args: Any, **options: Any) -> Any:
        calls.append(type(self).__name__)
        return read(self, *args, **options)

    monkeypatch.setattr(torch.nn.Module, "state_dict", counted)
    write_weights(module, {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)})
    assert calls == ["Linear"]
    with pytest.raises(WeightsMismatchError, match="bias"):
        write_weights(module, {"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(3, np.float32)})
    assert module.weight.tolist() == [[1.0] * 3] * 2, "a mismatch copies nothing"


def test_new_weights_take_effect_in_place_all_or_nothing() -> None:
    with runner("CartPole-v1") as sampler:
        sampler.sample(num_timesteps=4)
        weights = {k: np.zeros_like(v) for k, v in read_weights(sampler.module).items()}  # type: ignore[arg-type]
        before = sampler.get_state()["rl_module"]
        for bad in ({}, {**weights, "strange": np.zeros(1)}, {**weights, "head.weight": np.zeros((9, 9))}):
            with pytest.raises(ModuleError, match="learner the same module"):
                sampler.set_weights(bad, seq=1)
        assert all(np.array_equal(v, before[k]) for k, v in sampler.get_state()["rl_module"].items())
        for array in weights.values():
            array.flags.writeable = False
        sampler.set_weights(weights, seq=5, learner_epoch=1, digest="x")
        (chunk, *_) = sampler.sample(num_timesteps=4)
        assert not chunk.columns["values"].any()
        assert not chunk.columns["action_dist_inputs"].any()
        assert (chunk.learner_epoch, chunk.weights_digest, chunk.weights_seq.tolist()[0]) == (1, "x", 5)


class Plain(torch.nn.Module):
    """A user's module: no values, a column of its own."""

    noise_size = 1
    noise_kind = "uniform"

    def __init__(self, spaces: Spaces, answer: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.answer = answer

    def forward_exploration(self, batch: dict[str, Any]) -> Any:
        if self.answer is not None:
            return self.answer(batch)
        return {"actions": (batch["noise"][:, 0] * 3).long(), "state": self.layer(batch["obs"])}

    def forward_inference(self, batch: dict[str, Any]) -> Any:
        return {"actions": self.layer(batch["obs"]).argmax(-1), "state": self.layer(batch["obs"])}

    def forward_train(self, batch: dict[str, Any]) -> Any:
        return {}


def test_a_users_module_may_add_columns() -> None:
    with runner(module=Plain, num_envs=2) as sampler:
        for explore in (True, False):
            for c in sampler.sample(num_timesteps=8, explore=explore):
                assert set(c.columns) == {"state"} if len(c) else True
                assert len(c) == 0 or c.columns["state"].shape == (len(c), 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_a_policy_in_half_precision_arrive_as_float32(dtype: torch.dtype) -> None:
    half = torch.tensor([-0.5, 3.25], dtype=dtype)
    answer = {"actions": torch.zeros(2, dtype=torch.int64), "logp": half, "values": half * 2}
    with runner(module=lambda spaces: Plain(spaces, lambda batch: answer), num_envs=2) as sampler:
        batch = sampler.sample_fragment()
        assert {name: batch.columns[name].dtype for name in ("logp", "values")} == dict.fromkeys(
            ("logp", "values"), np.float32
        )
        assert set(batch.columns["logp"].tolist()) == {-0.5, 3.25}
    weights = read_weights(torch.nn.Linear(2, 1).bfloat16())
    assert weights["weight"].dtype == np.float32


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda b: None, "must be a dict with 'actions'"),
        (lambda b: {"actions": torch.zeros(1, dtype=torch.int64)}, r"should have shape \(2,\)"),
        (lambda b: {"actions": torch.zeros(2, 1, dtype=torch.int64)}, r"should have shape \(2,\)"),
        (lambda b: {"actions": np.zeros(2)}, "not a tensor"),
        (lambda b: {"actions": torch.zeros(2), "logp": torch.zeros(3)}, "not 2 rows"),
        (lambda b: 1 / 0, "failed while acting: ZeroDivisionError"),
    ],
)
def test_a_wrong_answer_of_a_module_raises_module_error(answer: Any, words: str) -> None:
    with (
        runner(module=lambda spaces: Plain(spaces, answer), num_envs=2) as sampler,
        pytest.raises(ModuleError, match=words),
    ):
        sampler.sample(num_timesteps=8)


def test_a_column_must_not_change_its_shape() -> None:
    calls = []

    def answer(batch: Any) -> Any:
        calls.append(1)
        return {"actions": torch.zeros(2, dtype=torch.int64), "x": torch.zeros(2, 1 + len(calls) // 3)}

    with (
        runner(module=lambda spaces: Plain(spaces, answer), num_envs=2) as sampler,
        pytest.raises(ModuleError, match="'x'"),
    ):
        sampler.sample(num_timesteps=20)


@pytest.mark.parametrize("late", [True, False], ids=["comes", "goes"])
def test_a_column_must_not_come_late_or_be_left_out(late: bool) -> None:
    """Its other rows would be memory that nobody wrote."""
    calls = []

    def answer(batch: Any) -> Any:
        calls.append(1)
        width = len(batch["obs"])
        extra = {"x": torch.zeros(width)} if (len(calls) > 3) is late else {}
        return {"actions": torch.zeros(width, dtype=torch.int64), **extra}

    with (
        runner(module=lambda spaces: Plain(spaces, answer), num_envs=2) as sampler,
        pytest.raises(ModuleError, match=r"\['actions'(, 'x')?\] at one step, and \['actions'(, 'x')?\] at another"),
    ):
        sampler.sample(num_timesteps=40)


@pytest.mark.parametrize("config", [{"activation": "gelu2"}, {"hidden": (0,)}, {"nonsense": 1}])
def test_bad_module_config_is_a_module_error(config: dict[str, Any]) -> None:
    with pytest.raises(ModuleError):
        runner(module_config=config)


def test_the_actor_forwards_the_observations_of_all_envs_together() -> None:
    seen = []

    class Watching(Plain):
        def forward_exploration(self, batch: dict[str, Any]) -> Any:
            seen.append(tuple(batch["obs"].shape))
            return super().forward_exploration(batch)

    spaces = Spaces(observation=convert(Counting.observation_space, ""), action=convert(Counting.action_space, ""))
    Actor(Watching(spaces), spaces, {"obs": np.zeros((4, 2), np.float32)}, int)(np.zeros((4, 1), np.float32))
    assert seen == [(4, 2)]


class _Answers(torch.nn.Module):
    """Gives `value` in the column `name` to the env `row`, and finite numbers elsewhere."""

    noise_size, noise_kind = 0, "uniform"

    def __init__(self, name: str = "", value: float = 0.0, continuous: bool = False) -> None:
        super().__init__()
        self.name, self.value, self.continuous = name, value, continuous

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = len(batch["obs"])
        answer = {name: torch.zeros(rows) for name in ("logp", "values", "mine")}
        answer["action_dist_inputs"] = torch.zeros(rows, 2)
        answer["actions"] = torch.zeros(rows, 1) if self.continuous else torch.zeros(rows)
        if self.name:
            answer[self.name][1] = self.value
        return answer

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.forward_exploration(batch)


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["actions", "logp", "values", "action_dist_inputs", "mine"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_policy_that_gives_numbers_that_are_not_finite_is_named_and_no_env_gets_them(
    env: str, name: str, value: float, explore: bool
) -> None:
    module = _Answers(continuous=env == "Pendulum-v1")
    with runner(env=env, module=lambda spaces: module, num_envs=2) as sampler:
        sampler.sample(num_timesteps=4, explore=explore)
        sampler.set_weights({}, 7, 1)
        module.name, module.value = name, value
        if name == "mine" or (name == "action_dist_inputs" and value == -np.inf):  # one's own; a mask
            sampler.sample(num_timesteps=4, explore=explore)
            return
        says = rf"{WITH}, the policy _Answers gives (NaN|infinite) {name}: "
        with pytest.raises(NotFiniteError, match=says) as caught:
            sampler.sample(num_timesteps=4, explore=explore)
        assert (caught.value.name, caught.value.bad) == (name, 2 if name == "action_dist_inputs" else 1)
        assert sampler.totals.env_failures == 0
        module.name = ""
        assert sampler.sample(num_timesteps=4, explore=explore), "it goes on with a policy that is finite again"


class _Unit(torch.nn.Module):
    """Divides by the length of the observation."""

    noise_size, noise_kind = 0, "uniform"

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        unit = batch["obs"] / batch["obs"].norm(dim=1, keepdim=True)
        return {"actions": torch.zeros(len(unit), dtype=torch.int64), "values": unit[:, 0]}

    forward_inference = forward_exploration


def test_numbers_that_are_not_finite_in_rows_of_envs_that_are_down_harm_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.004)

    class Far(Faulty):
        def observe(self) -> Any:
            return super().observe() + 100

    config = with_fault(diverge, faulty={1}, every=3)
    with runner(Far, num_envs=2, env_config=config, module=_Unit, env_restart_attempts=1000) as sampler:
        assert sum(sum(map(len, sampler.sample(num_timesteps=10))) for _ in range(8)) >= 40
        assert sampler.totals.discarded.keys() == {"env_exception"}


class _Acts(_Answers):
    """Gives `actions` to each env."""

    def __init__(self, actions: Any, by_arrays: bool = False) -> None:
        super().__init__()
        self.given = torch.as_tensor(actions)
        if by_arrays:
            self.numpy_act = lambda: lambda columns, noise: self._columns(columns["obs"])

    def _columns(self, obs: Any) -> dict[str, Any]:
        return {"actions": np.repeat(self.given.numpy()[None], len(obs), 0)}

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: torch.from_numpy(column) for name, column in self._columns(batch["obs"]).items()}


DISCRETE, SHIFTED, WHOLE = ACTIONS[0], ACTIONS[1], ACTIONS[4]


@pytest.mark.parametrize("by_arrays", [False, True], ids=["tensors", "arrays"])
@pytest.mark.parametrize(
    ("space", "given", "says"),
    [
        (DISCRETE, 6, r"actions 6 in 2 of 2 rows, outside Discrete\(4, start=2\)"),
        (DISCRETE, 1, "actions 1 in 2 of 2 rows, outside"),
        (
            SHIFTED,
            [0, 4, 2],
            r"actions \[0, 4, 2\] in 2 of 2 rows, outside MultiDiscrete\(\[2 3 4\], start=\[0 1 2\]\)",
        ),
        (SHIFTED, [0, 1, 1], r"actions \[0, 1, 1\]"),
        (
            gym.spaces.MultiBinary(3),
            torch.tensor([0, 2, 1], dtype=torch.int8),
            r"actions \[0, 2, 1\].* MultiBinary\(3\)",
        ),
    ],
)
def test_an_action_outside_its_space_is_the_policys_failure_and_no_env_gets_it(
    space: gym.Space[Any], given: Any, says: str, by_arrays: bool
) -> None:
    module = _Acts(given, by_arrays)
    with runner(_env(Counting.observation_space, space), module=lambda spaces: module, num_envs=2) as sampler:
        sampler.set_weights({}, 7, 1)
        with pytest.raises(ModuleError, match=f"{WITH}, the policy _Acts gives {says}"):
            sampler.sample(num_timesteps=4)
        assert (sampler.totals.env_failures, sampler.totals.stepped) == (0, 0)
        module.given = torch.as_tensor(space.sample())
        assert sampler.sample(num_timesteps=4), "it goes on with a policy that acts inside again"


@pytest.mark.parametrize(
    ("space", "given", "says"),
    [
        (DISCRETE, 2.5, r"actions 2.5 of float32, outside Discrete\(4, start=2\)"),
        (DISCRETE, 1e30, "actions 1.0000000150474662e.30 of float32, outside"),
        (gym.spaces.MultiBinary(3), [256, 0, 0], r"actions 256 of int64, outside MultiBinary\(3\)"),
        (WHOLE, [3.7, 0.0], r"actions 3.7.* of float32, outside Box\(0, 9, \(2,\), int32\)"),
        (gym.spaces.Box(0, 255, (2,), np.uint8), [300, 0], "actions 300 of int64, outside Box"),
    ],
)
def test_an_action_that_the_spaces_dtype_would_change_is_refused(space: gym.Space[Any], given: Any, says: str) -> None:
    env = _env(Counting.observation_space, space)
    with (
        runner(env, module=lambda spaces: _Acts(given), num_envs=2) as sampler,
        pytest.raises(ModuleError, match=f"^the policy _Acts gives {says}"),
    ):
        sampler.sample(num_timesteps=4)
    with (
        runner(env, module=lambda spaces: _Acts(given, by_arrays=True), num_envs=2) as sampler,
        pytest.raises(ModuleError, match=r"column 'actions' is (float32|int64), not (int64|int32|int8|uint8)"),
    ):
        sampler.sample(num_timesteps=4)


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (DISCRETE, 3.0),
        (DISCRETE, torch.tensor(3, dtype=torch.int32)),
        (gym.spaces.MultiBinary(3), [True, False, True]),
        (WHOLE, torch.tensor([9.0, 0.0])),
        (WHOLE, [12, -1]),
        (gym.spaces.Box(-1.0, 1.0, (2,)), torch.tensor([1.5, -3.0], dtype=torch.float64)),
    ],
)
def test_an_action_that_the_spaces_dtype_holds_is_taken_and_a_box_may_be_left(
    space: gym.Space[Any], given: Any
) -> None:
    env = _env(Counting.observation_space, space)
    env.step = Counting.step  # type: ignore[method-assign]
    with runner(env, module=lambda spaces: _Acts(given), num_envs=2) as sampler:
        (chunk, _) = sampler.sample(num_timesteps=4)
    assert chunk.actions.dtype == space.dtype
    assert (chunk.actions == np.asarray(given)).all()


@pytest.mark.parametrize("value", [6.0, 0.5])
def test_what_a_policy_gives_to_envs_that_do_not_act_is_not_looked_at(value: float) -> None:
    spaces = Spaces(observation=convert(Counting.observation_space, ""), action=convert(Counting.action_space, ""))
    actor = Actor(_Answers("actions", value), spaces, {"obs": np.zeros((3, 2), np.float32)}, int)
    assert actor(None, np.array([0, 2]))["actions"][[0, 2]].tolist() == [0, 0]
    with pytest.raises(ModuleError, match=rf"actions {value:g}.* outside Discrete"):
        actor(None, np.array([0, 1]))


class _Adds(Connector):
    def connect(self, spaces: Spaces, width: int) -> Spaces:
        return spaces

    def process(self, rows: Any) -> Any:
        return {name: column + 1 for name, column in rows.columns.items()}


def test_an_action_that_a_connector_moves_out_of_its_space_is_the_connectors_failure() -> None:
    env = _env(Counting.observation_space, DISCRETE)
    settings = {"module": lambda spaces: _Acts(5), "module_to_env": [_Adds], "num_envs": 2}
    with (
        runner(env, **settings) as sampler,
        pytest.raises(
            ConnectorError, match=r"_Adds failed: module_to_env made actions 6 in 2 of 2 rows, outside Discr"
        ),
    ):
        sampler.sample(num_timesteps=4)


@pytest.mark.parametrize("mode", [None, "sync"])
def test_an_env_that_refuses_an_action_outside_its_box_is_not_told_to_be_repaired(mode: Any) -> None:
    class Strict(_env(Counting.observation_space, gym.spaces.Box(-1.0, 1.0, (2,)))):  # type: ignore[misc]
        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action)
            return super().step(action)

    module = _Acts([0.5, -1.5])
    settings = {"env_restart_attempts": 1, "gym_env_vectorize_mode": mode, "module": lambda spaces: module}
    with runner(Strict, num_envs=2, **settings) as sampler:
        sampler.set_weights({}, 7, 1)
        sampler.sample(num_timesteps=2)
        with pytest.raises(EnvRestartBudgetError, match=r"weights 7 gave it actions \[0.5, -1.5\] .*Clip") as caught:
            sampler.sample(num_timesteps=4)
        assert "repair the env" not in str(caught.value)
        assert "outside Box(-1.0, 1.0, (2,), float32)" in sampler.totals.newest_env_failure


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_default_policy_does_not_act_on_weights_that_are_nan(env: str) -> None:
    with runner(env=env, num_envs=2) as sampler:
        weights = {name: torch.full_like(tensor, np.nan) for name, tensor in sampler.module.state_dict().items()}
        sampler.set_weights(weights, 7, 1)
        with pytest.raises(NotFiniteError, match=f"{WITH}, the policy ActorCritic gives NaN"):
            sampler.sample(num_timesteps=4)


@pytest.mark.parametrize(
    ("own", "given", "fits"),
    [
        (torch.float32, torch.float64, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float8_e4m3fn, True),
        (torch.float8_e5m2, torch.float8_e5m2, True),
        (torch.float8_e4m3fn, torch.float32, True),
        (torch.float32, torch.int64, False),
        (torch.float32, torch.bool, False),
        (torch.float32, torch.complex64, False),
        (torch.int64, torch.float32, False),
        (torch.int64, torch.bool, False),
        (torch.bool, torch.uint8, False),
        (torch.int64, torch.uint8, True),
        (torch.int8, torch.int64, False),
    ],
)
def test_weights_are_cast_where_only_rounding_changes(own: torch.dtype, given: torch.dtype, fits: bool) -> None:
    module = torch.nn.Module()
    module.register_buffer("w", torch.zeros(2, dtype=own))
    weights = {"w": (torch.tensor([300, 1]) if given is torch.int64 else torch.tensor([1, 1])).to(given)}
    if fits:
        write_weights(module, weights)
        assert module.state_dict()["w"].float().tolist() == [1, 1]
    else:
        with pytest.raises(
            WeightsMismatchError, match=r"'w' is .*, the module's .*, and a cast would change its numbers"
        ):
            write_weights(module, weights)


@pytest.mark.parametrize("n", [4, 2000])
@pytest.mark.parametrize("width", [1, 32, 33])
def test_every_choice_of_a_discrete_space_and_no_other_is_inside_it(width: int, n: int) -> None:
    limits = ActionLimits(Discrete(n=n, start=2), "actions")
    for choice, inside in ((1, False), (2, True), (n + 1, True), (n + 2, False), (2**62, False), (-(2**63), False)):
        actions = np.full(width, 3)
        actions[-1] = choice
        assert (limits.problem({"actions": actions}) == "") == inside
    assert limits.problem({"actions": np.full((width, 1), 3)}) == ""


@pytest.mark.parametrize(
    ("own", "given", "fits"),
    [
        (torch.float32, np.array([1e300, 0.0]), False),
        (torch.float16, np.array([70000.0, 0.0], np.float32), False),
        (torch.float16, torch.tensor([-70000.0, 0.0], dtype=torch.bfloat16), False),
        (torch.float16, np.array([-np.inf, 1e-9], np.float32), True),
        (torch.float32, np.array([np.nan, np.inf]), True),
        (torch.int64, np.array([2**63 + 5, 0], np.uint64), False),
        (torch.int64, np.array([2**63 - 1, 0], np.uint64), True),
        (torch.float32, np.array([1.0, 2.0], ">f4"), True),
        (torch.float32, np.ma.array([1.0, 2.0], np.float32, mask=False), True),
        (torch.float32, np.ma.array([1.0, 2.0], np.float32, mask=[True, False]), False),
        (torch.float64, np.ma.array([1.0, 2.0], mask=[True, False]), False),
        (torch.float8_e4m3fn, np.array([1e9, 0.0], np.float32), False),
        (torch.float8_e4m3fn, np.array([0.3, 0.0], np.float32), False),
        (torch.float8_e4m3fn, torch.tensor([5e4, 0.0]).to(torch.float8_e5m2), False),
        (torch.float16, torch.tensor([1e30, 1.0]).to(FLOAT8_E8M0FNU), False),
        (torch.float32, torch.zeros(2, device="meta"), False),
        (torch.int64, torch.zeros(2, dtype=torch.int64, device="meta"), False),
        (torch.float32, torch.tensor([1.0, 2.0]).to_sparse(), False),
        (torch.float32, np.array([1.0, 2.0], object), False),
        (torch.float32, np.array(["1", "2"]), False),
        (torch.float32, np.zeros(2, "i4,f4"), False),
    ],
    ids=str,
)
def test_no_weight_becomes_infinite_or_another_number_by_a_cast(own: torch.dtype, given: Any, fits: bool) -> None:
    module = torch.nn.Module()
    module.register_buffer("w", torch.zeros(2, dtype=own))
    if fits:
        write_weights(module, {"w": given})
        np.testing.assert_array_equal(module.state_dict()["w"].numpy(), given.astype(module.w.numpy().dtype))  # type: ignore[operator, union-attr]
    else:
        with pytest.raises(
            WeightsMismatchError, match=r"'w' is .*, the module's .*, and a cast would change its numbers"
        ):
            write_weights(module, {"w": given})


class _Explores(ActorCritic):
    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().forward_exploration(batch) | {"values": torch.full((len(batch["noise"]),), 7.0)}


class _Infers(ActorCritic):
    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().forward_inference(batch) | {"values": torch.full((len(batch["obs"]),), 8.0)}


class _Trains(ActorCritic):
    def forward_train(self, batch: dict[str, Any]) -> dict[str, Any]:
        answer = super().forward_train(batch)
        return answer | {"action_dist_inputs": -3.0 * answer["action_dist_inputs"]}


def _another_activation(module: ActorCritic) -> None:
    module.trunk[1] = torch.nn.ELU()


def _a_layer_more(module: ActorCritic) -> None:
    module.trunk.append(torch.nn.LayerNorm(64, elementwise_affine=False))


def _a_hook(module: ActorCritic) -> None:
    module.head.register_forward_hook(lambda layer, args, output: output * 2.0)


def _another_head(module: ActorCritic) -> None:
    module.head = torch.nn.Sequential(module.head, torch.nn.Linear(3, 3))  # type: ignore[assignment]


def _spectral_norm(module: ActorCritic) -> None:
    torch.nn.utils.parametrizations.spectral_norm(module.head)


def _its_own_method(module: ActorCritic) -> None:
    whole = module.forward_exploration
    module.forward_exploration = lambda batch: whole(batch) | {"values": torch.zeros(4)}  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [ActorCritic, _Explores, _Infers, _Trains])
@pytest.mark.parametrize(
    "change",
    [None, _another_activation, _a_layer_more, _a_hook, _another_head, _spectral_norm, _its_own_method],
    ids=lambda change: getattr(change, "__name__", "as it is"),
)
def test_a_module_derived_or_changed_by_its_user_acts_as_its_own_methods_do(
    kind: type[ActorCritic], change: Callable[[ActorCritic], None] | None
) -> None:
    spaces = _spaces(gym.spaces.Discrete(2))
    module = kind(spaces, (64, 64), "tanh", True, 0.0, 1).eval()
    if change:
        change(module)
    obs = np.random.default_rng(2).normal(size=(4, 4)).astype(np.float32)
    noise = np.random.default_rng(3).random((4, module.noise_size), np.float32)
    for given in (noise, None):
        batch: dict[str, Any] = {"obs": torch.from_numpy(obs)}
        with torch.inference_mode():
            due = (
                module.forward_inference(batch)
                if given is None
                else module.forward_exploration(batch | {"noise": torch.from_numpy(given), "t": 0})
            )
        columns = Actor(module, spaces, {"obs": obs}, int)(given)
        assert columns.keys() == due.keys()
        for name, column in due.items():
            np.testing.assert_allclose(columns[name], column.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", [ActorCritic, _Explores])
def test_a_module_on_another_device_is_told_so(kind: type[ActorCritic]) -> None:
    says = f"the policy {kind.__name__} failed .*; it is on meta, .* on the CPU: build"
    module = kind(_spaces(gym.spaces.Discrete(2)), (8,), "tanh", True, 0.0, 1).to("meta")
    with pytest.raises(ModuleError, match=says), runner("CartPole-v1", module=lambda _: module) as sampler:
        sampler.sample(num_timesteps=8)


class Remembering(torch.nn.Module):
    """A user's module, with a memory, which reads `t`."""

    noise_size, noise_kind = 1, "uniform"

    def __init__(self, spaces: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def initial_state(self) -> dict[str, torch.Tensor]:
        return {"h": torch.zeros(2)}

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.answer(batch, batch["noise"][:, 0], batch["t"])

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.answer(batch, torch.full((len(batch["obs"]),), 0.5), 0)

    def answer(self, batch: dict[str, Any], below: torch.Tensor, t: int) -> dict[str, Any]:
        h = torch.tanh(self.layer(batch["obs"]) + batch["state_in"]["h"])
        actions = (below < torch.sigmoid(h[:, 0])).long()
        return {"actions": actions, "values": h[:, 1], "t": actions * 0 + t, "state_out": {"h": h}}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, at an import
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("explore", [True, False])
def test_a_compiled_pass_gives_the_same_numbers_and_takes_new_weights(
    backend: str, explore: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    compiler = torch.compile

    def compiled(call: Any) -> Any:
        calls.append(call.__name__)
        return compiler(call, backend=backend)

    monkeypatch.setattr(torch, "compile", compiled)
    seen = []
    for compiles in (False, True):
        torch.manual_seed(0)
        with runner(Walk, module=Remembering, num_envs=3, explore=explore, module_compile=compiles) as sampler:
            before = sampler.sample(num_timesteps=30)
            weights = {name: array * 0 + 0.1 for name, array in sampler.get_state()["rl_module"].items()}
            sampler.set_weights(weights, 1)
            seen.append([*before, *sampler.sample(num_timesteps=30)])
    assert calls == ["forward_exploration", "forward_inference"]
    plain, made = seen
    assert [len(chunk) for chunk in made] == [len(chunk) for chunk in plain]
    for one, other in zip(plain, made, strict=True):
        assert one.columns.keys() == other.columns.keys() >= {"t", "values"}
        for name, column in one.columns.items():
            np.testing.assert_allclose(other.columns[name], column, rtol=1e-5, err_msg=name)
