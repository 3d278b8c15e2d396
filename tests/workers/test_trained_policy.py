"""A trained policy and its exported file act like the runner that trained it, on one observation and on batches."""

from __future__ import annotations

import os
import re
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch
from golden_envs import Choices, Nested, Picture, Push, Walk
from torch.torch_version import TorchVersion

from headrace.schemas.chunks.spaces import Box, Discrete, Spaces, leaves
from headrace.schemas.errors import ModuleError, PolicyCallError
from headrace.workers import EnvRunner, EnvRunnerConfig, MultiAgentEnvRunner, SingleAgentEnvRunner
from headrace.workers.agents.examples import TwoCarts, two_carts
from headrace.workers.connectors import (
    AgentOneHot,
    ClipActions,
    FlattenObservations,
    FrameStack,
    MeanStd,
    PreviousActionReward,
    UnsquashActions,
)
from headrace.workers.connectors.vector_connectors import join_states
from headrace.workers.envs.spaces import convert
from headrace.workers.policy.module_protocol import weights_bounded
from headrace.workers.trained.trained_policy import TrainedPolicy
from support.raw_zmtp import memory_of
from support.runners.recurrent import LSTM, REMEMBERING
from support.runners.stand_in_device import Counts, stand_in

OLD_TORCH = torch.__version__ < "2.10"  # as versions, which torch compares
"""It writes .pt2 and .onnx of few modules."""
WRITES_ONNX = pytest.mark.skipif(OLD_TORCH, reason="torch before 2.10 writes .onnx of no module here")
NEEDS_SB3 = pytest.mark.skipif(find_spec("stable_baselines3") is None, reason="Stable-Baselines3 is not installed")

AGENT, FLAT = (f"headrace.workers.connectors:{name}" for name in ("AgentOneHot", "FlattenObservations"))
PIPELINES = ("env_to_module", "module_to_env")


class Masked(Walk):
    """A walk that forbids actions."""

    observation_space: Any = gym.spaces.Dict(
        {"at": gym.spaces.Box(-1000.0, 1000.0, (2,), np.float32), "action_mask": gym.spaces.MultiBinary(5)}
    )

    def observe(self) -> Any:
        legal = np.array([self.sum >> bit & 1 for bit in range(5)], np.int8)
        legal[self.time % 5] = 1
        return {"at": np.array([self.sum / 64, self.time / 8], np.float32), "action_mask": legal}


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "statistics": (Walk, {"env_to_module": [MeanStd]}),
    "scaled": (Push, {"env_to_module": [MeanStd]}),
    "nested": (Nested, {}),
    "flattened": (Nested, {"env_to_module": [FlattenObservations, MeanStd]}),
    "masked": (Masked, {}),
    "pictures": (Picture, {}),
    "choices": (Choices, {}),
    "bounded": (Push, {"module_to_env": [UnsquashActions, ClipActions]}),
    "remembering": (Push, REMEMBERING),
    "stacked": (Walk, {"env_to_module": [FrameStack]}),
}
MEMORYLESS = ("statistics", "scaled", "nested", "flattened", "masked", "pictures", "choices", "bounded")


def trained(env: Any, **settings: Any) -> tuple[EnvRunnerConfig, SingleAgentEnvRunner]:
    """Return a runner that has sampled, of a module whose actions differ from one observation to the next."""
    config = EnvRunnerConfig(env=env, seed=3, explore=False, **settings)
    runner = SingleAgentEnvRunner(config, run_uid="test")
    for parameter in runner.modules["default_policy"].parameters():  # type: ignore[union-attr]
        parameter.data.mul_(4)
    runner.sample(num_timesteps=40)
    runner.freeze_connectors()
    return config, runner


def spaces_of(runner: EnvRunner[Any]) -> dict[str, Spaces]:
    return {
        module_id: Spaces(observation=convert(seen, "seen"), action=convert(done, "done"))
        for module_id, (seen, done) in runner.get_spaces().items()
        if not module_id.startswith("__")  # not a module: the env itself
    }


def policy_of(config: EnvRunnerConfig, runner: SingleAgentEnvRunner, **options: Any) -> TrainedPolicy:
    state = runner.get_state()
    arrays = {**state["rl_module"], **join_states({name: state[name] for name in PIPELINES if name in state})}
    return TrainedPolicy(config, spaces_of(runner), arrays, **options)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(np.allclose(one, other, 1e-4, 1e-4))


def row(batch: Any, at: int) -> Any:
    if isinstance(batch, dict):
        return {key: row(part, at) for key, part in batch.items()}
    return tuple(row(part, at) for part in batch) if isinstance(batch, tuple) else batch[at]


def batch_of(env: Any, count: int) -> Any:
    """Return observations of `count` walks, nested as one is."""
    seen = []
    for seed in range(count):
        walk = env()
        walk.reset(seed=seed)
        seen.append(walk.step(walk.action_space.sample())[0])
    return joined(seen)


def joined(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: joined([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], tuple):
        return tuple(map(joined, map(list, zip(*values, strict=True))))
    return np.stack(values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_plays_the_same_episodes_as_its_runner(kind: str) -> None:
    env, settings = KINDS[kind]
    config, runner = trained(env, **settings)
    with runner:
        chunks = [chunk for chunk in runner.sample(num_episodes=6) if len(chunk) > 1]
        policy = policy_of(config, runner)
    assert len({len(chunk) for chunk in chunks}) > 1
    different = set()
    for chunk in chunks:
        walk = env()
        observation, _ = walk.reset(seed=chunk.seed)
        policy.reset()
        reward = 0.0
        for step in range(len(chunk)):
            action = policy.act(observation, rewards=reward)
            assert walk.action_space.contains(action)
            observation, reward, terminated, truncated, _ = walk.step(action)
            assert reward == chunk.rewards[step], f"step {step} of {len(chunk)}"
            different.add(repr(action))
        assert terminated or truncated
    assert len(different) > 1, "a policy that always does the same would prove little"


@pytest.mark.parametrize("kind", MEMORYLESS)
def test_a_batch_of_any_size_gets_the_actions_of_its_single_rows(kind: str) -> None:
    env, settings = KINDS[kind]
    config, runner = trained(env, **settings)
    with runner:
        policy = policy_of(config, runner, seed=5)
    for count in (1, 4, 3):
        batch = batch_of(env, count)
        actions = policy.act(batch)
        for at in range(count):
            single = policy.act(row(batch, at))
            assert env.action_space.contains(single)
            assert equal(row(actions, at), single)
        assert equal(policy.act(batch), actions), "connectors learn nothing"


def test_sampled_actions_differ_and_repeat_by_seed() -> None:
    config, runner = trained(Push)
    with runner:
        policy, again = (policy_of(config, runner, seed=5) for _ in range(2))
    batch = batch_of(Push, 4)
    sampled = [policy.act(batch, explore=True) for _ in range(3)]
    assert not equal(sampled[0], sampled[1])
    assert equal([again.act(batch, explore=True) for _ in range(3)], sampled)
    assert not equal(policy.act(batch[:1], explore=True), sampled[0][:1]), "another batch draws other numbers"


def test_each_row_of_a_batch_remembers_its_own_episode() -> None:
    config, runner = trained(Push, **REMEMBERING)
    with runner:
        policy = policy_of(config, runner)
    walks = [batch_of(Push, 3) + step for step in range(4)]
    together = [policy.act(batch, rewards=np.arange(3.0)) for batch in walks]
    for at in range(3):
        other = policy.with_own_memory()
        alone = [other.act(batch[at], rewards=float(at)) for batch in walks]
        assert equal([*alone], [actions[at] for actions in together])
    assert not equal(policy.act(walks[0], rewards=0.0), together[0]), "it remembers"
    policy.reset([1])
    mixed = policy.act(walks[0], rewards=0.0)
    assert equal(mixed[1], together[0][1])
    assert not equal(mixed[0], together[0][0])
    with pytest.raises(PolicyCallError, match=r"the batch has 2 rows, and the policy remembers 3 episodes; call reset"):
        policy.act(walks[0][:2])
    policy.reset()
    assert equal(policy.act(walks[0][:2]), together[0][:2])


class Shift(MeanStd):
    """Learns, and knows no way to stop."""

    freeze = None  # type: ignore[assignment]

    def process(self, rows: Any) -> Any:
        return {"obs": super().process(rows)["obs"] + 0.1}


def test_a_connector_that_cannot_be_frozen_is_restored_after_each_call() -> None:
    config, runner = trained(Push, env_to_module=[Shift])
    with runner:
        policy = policy_of(config, runner)
    batch = batch_of(Push, 3)
    first = policy.act(batch)
    for scale in (1, 50, 0):
        policy.act(batch * scale)
    assert np.array_equal(policy.act(batch), first)


def test_weights_without_the_state_of_their_connectors_are_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    config, runner = trained(Walk, env_to_module=[MeanStd])
    with runner:
        policy_of(config, runner)
        assert not caplog.records
        TrainedPolicy(config, spaces_of(runner), runner.get_state()["rl_module"], source="runs/a")
    assert "runs/a has no state of the connectors of module 'default_policy'" in caplog.text


def test_agents_are_played_by_their_own_policies_with_their_own_memory() -> None:
    config = EnvRunnerConfig(
        env=two_carts,
        seed=1,
        explore=False,
        policies={"short": None, "long": {"env_to_module": [{"build": AGENT, "config": {"num_agents": 2}}, FLAT]}},
        module=LSTM,
    )
    with MultiAgentEnvRunner(config, run_uid="test") as runner:
        for module in runner.modules.values():
            for parameter in module.parameters():  # type: ignore[union-attr]
                parameter.data.mul_(4)
        weights = runner.get_state()["rl_module"]
        chunks = [chunk for chunk in runner.sample(num_episodes=1) if len(chunk)]
        policy = TrainedPolicy(config, spaces_of(runner), weights, agents=["short", "long"])
    env = TwoCarts()
    observations, _ = env.reset(seed=chunks[0].seed)
    played: dict[str, list[int]] = {"short": [], "long": []}
    while observations:
        actions = {agent: policy.act(seen, agent=agent) for agent, seen in observations.items()}
        for agent, action in actions.items():
            played[agent].append(int(action))
        observations, _, terminateds, truncateds, _ = env.step(actions)
        observations = {a: seen for a, seen in observations.items() if not terminateds[a] and not truncateds[a]}
    assert played == {chunk.agent_id: chunk.actions.tolist() for chunk in chunks}
    with pytest.raises(ModuleError, match="this fleet's modules are"):
        policy.act(np.zeros(4, np.float32))
    with pytest.raises(ModuleError, match="this fleet's modules are"):
        _ = policy.module


@pytest.mark.parametrize("kind", ["masked", "remembering"])
def test_a_policy_acts_on_the_device_of_its_config(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, settings = KINDS[kind]
    config, runner = trained(env, **settings)
    seen = [batch_of(env, 3) for _ in range(4)]
    path = tmp_path / "policy.pt"
    with runner:
        here = policy_of(config, runner, seed=1)
        with stand_in(monkeypatch) as device:
            there = policy_of(config.model_copy(update={"device": "cuda"}), runner, seed=1)
            acted = [there.act(seen[0], explore=True)]
            device.take()
            acted += [there.act(batch, explore=True, rewards=0.0) for batch in seen[1:]]
            assert device.take() == Counts(there=3, back=3, waits=3)
            if kind == "masked":
                there.export(path)
            assert {tensor.device.type for tensor in there.module.state_dict().values()} == {"meta"}
    assert equal(acted, [here.act(batch, explore=True, rewards=0.0) for batch in seen])
    assert path.exists() == (kind == "masked")


EXPORTS = [("statistics", ".pt"), ("flattened", ".pt2"), ("pictures", ".pt"), ("choices", ".pt2"), ("bounded", ".onnx")]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("kind", "suffix"), [*EXPORTS, *((kind, suffix) for kind in ("nested", "masked") for suffix in (".pt", ".onnx"))]
)
def test_an_exported_file_gives_the_same_actions(kind: str, suffix: str, tmp_path: Path) -> None:
    env, settings = KINDS[kind]
    config, runner = trained(env, **settings)
    with runner:
        policy = policy_of(config, runner)
    path = tmp_path / f"policy{suffix}"
    if OLD_TORCH and suffix != ".pt":
        with pytest.raises(ModuleError, match=refusal_of(suffix)):
            policy.export(path)
        return
    assert policy.export(path) == path
    assert list(tmp_path.iterdir()) == [path]
    (spaces,) = policy.spaces.values()
    for count in (1, 5):
        batch = batch_of(env, count)
        inputs = dict(zip((name for name, _ in leaves(spaces.observation, "obs")), flat(batch), strict=True))
        for seen, due in zip(run(path, inputs), flat(policy.act(batch)), strict=True):
            assert seen.dtype == due.dtype
            assert equal(seen, due)


def refusal_of(suffix: str, version: str = torch.__version__) -> str:
    """Return what an export says of an old torch, as a pattern."""
    return rf"torch {re.escape(version)} cannot write \{suffix} files of most modules; use torch 2\.10"


def flat(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [leaf for key in sorted(batch) for leaf in flat(batch[key])]  # as gymnasium sorts a Dict
    return [leaf for part in batch for leaf in flat(part)] if isinstance(batch, tuple) else [batch]


def run(path: Path, inputs: dict[str, Any]) -> list[Any]:
    """Run the file with the library that it is for."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(str(path))
        assert {given.name for given in session.get_inputs()} <= inputs.keys()
        return list(session.run(None, {given.name: inputs[given.name] for given in session.get_inputs()}))
    load: Any = torch.jit.load if path.suffix == ".pt" else lambda file: torch.export.load(file).module()
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # torch.jit.load says that torch.export is newer
            warnings.simplefilter("ignore", category)
        loaded = load(path)
    made = loaded(*map(torch.from_numpy, inputs.values()))
    return [part.numpy() for part in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize("scalar", ["observation", "action"])
def test_a_policy_of_scalars_is_exported(scalar: str, tmp_path: Path) -> None:
    """Earlier, the error said that the module had other operations than torch's."""
    one, several = Box(shape=(), dtype="<f4", low=-1.0, high=1.0), Box(shape=(3,), dtype="<f4", low=-1.0, high=1.0)
    sides = {"observation": several, "action": several, scalar: one}
    pieces: dict[str, Any] = {"env_to_module": [MeanStd], "module_to_env": [UnsquashActions, ClipActions]}
    policy = TrainedPolicy(EnvRunnerConfig(env="x:y", **pieces), {"default_policy": Spaces(**sides)}, {})
    assert policy.export_file(tmp_path / "policy.pt").difference < 1e-5


class ThroughNumpy(torch.nn.Module):
    """A module that leaves torch on its way."""

    noise_size, noise_kind = 1, "uniform"

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 5)

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": torch.from_numpy(self.layer(batch["obs"]).detach().numpy().argmax(1) - 1)}

    forward_exploration = forward_train = forward_inference


class OfOneSize(ThroughNumpy):
    """A module that looks at the number of rows when it is traced."""

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "actions": self.layer(batch["obs"])[: len(batch["obs"])].argmax(1).clamp(max=3) - len(batch["obs"]) // 7
        }


@pytest.mark.parametrize(
    ("settings", "suffix", "why"),
    [
        (REMEMBERING, ".pt", "LstmActorCritic remembers earlier observations"),
        ({"env_to_module": [FrameStack]}, ".onnx", "connector FrameStack looks at earlier steps"),
        pytest.param(
            {"module": ThroughNumpy},
            ".pt2",
            "ThroughNumpy does not consist of torch operations alone",
            marks=pytest.mark.skipif(OLD_TORCH, reason="an old torch writes operations of numpy too"),
        ),
        ({"module": OfOneSize}, ".pt", "other actions than the policy itself for a batch of 7 rows"),
        ({}, ".h5", "name a file that ends with .pt, .pt2, .onnx"),
    ],
)
def test_an_impossible_export_is_refused(settings: dict[str, Any], suffix: str, why: str, tmp_path: Path) -> None:
    config, runner = trained(Walk, **settings)
    with runner:
        policy = policy_of(config, runner)
    with pytest.raises(ModuleError, match=why):
        policy.export(tmp_path / f"policy{suffix}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModuleError, match=r"cannot be written"):
        policy_of(*trained(Walk)).export(tmp_path / "nowhere" / "policy.pt")
    with pytest.raises(ModuleError, match=r"/proc/policy\.pt: it cannot be written \(No such file"):
        policy_of(*trained(Walk)).export("/proc/policy.pt")


class ByValues(ThroughNumpy):
    """A module with an `if` on values of its observations."""

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        scores = self.layer(batch["obs"])
        return {"actions": (scores if batch["obs"].sum() > 0 else -scores).argmax(1) - 1}


class ByRows(ThroughNumpy):
    """A module with a loop over the rows."""

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": torch.stack([self.layer(row) for row in batch["obs"]]).argmax(1) - 1}


class Unusual(ThroughNumpy):
    """A module with an operation that ONNX lacks."""

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": torch.special.bessel_j0(self.layer(batch["obs"])).argmax(1) - 1}


PLACE = rf"at \S*{Path(__file__).name}:\d+\)"


@pytest.mark.parametrize(
    ("module", "suffix", "why"),
    [
        (ByValues, ".pt2", rf"ByValues takes a path that depends on values .*torch\.where.*GuardOnDataDep.*, {PLACE}"),
        (ByValues, ".onnx", r"ByValues takes a path that depends on values of observations, by an `if`"),
        (
            ByValues,
            ".pt",
            rf"by up to \d; torch says of \S*{Path(__file__).name}:\d+: Converting a tensor to a Python bool",
        ),
        (ByRows, ".pt2", r"ByRows is bound to one number of rows, by a loop .*Constraints violated"),
        (ByRows, ".onnx", r"ByRows is bound to one number of rows"),
        (Unusual, ".onnx", r"Unusual has an operation that ONNX lacks; use others, or export to \.pt2 .*bessel_j0\)"),
    ],
)
def test_a_refused_export_tells_cause_and_remedy_and_prints_no_graph(
    module: Any, suffix: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, runner = trained(Walk, module=module)
    with runner:
        policy = policy_of(config, runner)
    capfd.readouterr()
    with pytest.raises(ModuleError, match=refusal_of(suffix) if OLD_TORCH and suffix != ".pt" else why):
        policy.export(tmp_path / f"policy{suffix}")
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_an_old_torch_that_fails_at_an_export_is_named_in_the_place_of_the_module(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(*trained(Walk, module=ByValues))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    with pytest.raises(ModuleError, match=rf"{refusal_of(suffix, '2.9.1')} or newer, or export to \.pt \(\w+: "):
        policy.export(tmp_path / f"policy{suffix}")


@pytest.mark.parametrize("suffix", [".pt", pytest.param(".onnx", marks=WRITES_ONNX)])
def test_an_export_tells_inputs_and_outputs_in_their_order_and_how_it_was_tried(suffix: str, tmp_path: Path) -> None:
    config, runner = trained(Nested)
    with runner:
        policy = policy_of(config, runner)
    written = policy.export_file(tmp_path / f"policy{suffix}")
    (spaces,) = policy.spaces.values()
    names = [name for name, _ in leaves(spaces.observation, "obs")]
    assert [name for name, _ in written.inputs] == names
    assert ("obs/bits", "int8 (rows, 3)") in written.inputs
    assert [name for name, _ in written.outputs] == [name for name, _ in leaves(spaces.action, "actions")]
    assert (written.unread, written.path) == ([], tmp_path / f"policy{suffix}")
    assert 0.0 <= written.difference < 1e-3
    said = written.in_words().splitlines()
    assert f"  input 1: {names[0]}, {dict(written.inputs)[names[0]]}" in said
    assert "tried with 1 and 7 random observations: the largest difference" in said[-1]
    if suffix == ".onnx":
        session = onnxruntime.InferenceSession(str(written.path))
        assert [given.name for given in session.get_inputs()] == names
        assert re.match(r"ONNX of opset \d+, tried by onnxruntime ", said[0])


@WRITES_ONNX
def test_an_onnx_file_that_this_onnxruntime_cannot_read_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_old(*_: Any, **__: Any) -> None:
        raise RuntimeError("ONNX Runtime only guarantees support for models stamped with official released opset")

    monkeypatch.setattr(onnxruntime, "InferenceSession", too_old)
    policy = policy_of(*trained(Walk))
    with pytest.raises(ModuleError, match=r"does not read ONNX of opset \d+ .*pip install --upgrade onnxruntime"):
        policy.export(tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_module_may_be_as_large_as_its_weights() -> None:
    size = 300 << 18  # 300 MiB, which torch reserves only
    with weights_bounded({"ballast": np.broadcast_to(np.float32(0), (size,))}):
        torch.nn.Module().register_buffer("ballast", torch.empty(size))
    with weights_bounded({}), pytest.raises(ModuleError, match="for its 0 weights"):
        torch.nn.Module().register_buffer("ballast", torch.empty(size))


def test_a_missing_reward_for_previous_action_reward_is_refused() -> None:
    """Earlier, the policy saw rewards of 0."""
    config, runner = trained(Walk, env_to_module=[PreviousActionReward])
    with runner:
        policy = policy_of(config, runner)
    seen = np.zeros((2, 3), np.float32)
    policy.act(seen)
    with pytest.raises(PolicyCallError, match=r"call act\(..., rewards=...\)"):
        policy.act(seen)
    policy.act(seen, rewards=[1.0, 2.0])
    policy.reset([1])
    with pytest.raises(PolicyCallError, match="rewards"):
        policy.act(seen)
    policy.reset()
    policy.act(seen)


@pytest.mark.parametrize("agents", [["red", "blue"], []])
def test_a_missing_agent_for_agent_one_hot_is_refused(agents: list[str]) -> None:
    """Earlier, it played as the first agent."""
    spaces = {"shared": Spaces(observation=Box(shape=(2,), dtype="<f4"), action=Discrete(n=2))}
    pieces = [partial(AgentOneHot, 2)]
    config = EnvRunnerConfig(
        env="x:y", policies=["shared"], policy_mapping_fn=lambda *_, **__: "shared", env_to_module=pieces
    )
    policy, seen = TrainedPolicy(config, spaces, {}, agents=agents), np.zeros(2, np.float32)
    for agent in agents:
        policy.act(seen, agent=agent)
    for call in ({"agent": "bleu"}, {}, {"module_id": "shared"}):
        with pytest.raises(PolicyCallError, match=f"which agent acts, and {call.get('agent')!r} is none of"):
            policy.act(seen, **call)


def test_an_observation_of_a_wrong_form_raises_policy_call_error() -> None:
    config, runner = trained(Nested)
    with runner:
        policy = policy_of(config, runner)
    good = row(batch_of(Nested, 1), 0)
    for changed, named in (
        ({"bits": np.zeros(4, np.int8)}, r"'obs/bits' should be int8 \(3,\), or \('rows', 3\) in a batch"),
        ({"bits": np.zeros(3)}, r"and is float64 \(3,\)"),
        ({"bits": np.zeros((2, 3), np.int8)}, r"have \['2', 'None'\] rows; give all the same"),
    ):
        with pytest.raises(PolicyCallError, match=named):
            policy.act({**good, **changed})
    with pytest.raises(PolicyCallError, match=r"should have the parts \['arm', 'bits', 'pair'\]"):
        policy.act(np.zeros(3))
    assert Nested.action_space.contains(policy.act(good))


@pytest.mark.parametrize(
    ("space", "observed", "named"),
    [
        (gym.spaces.Box(0, 255, (2,), np.uint8), np.array([300, 1], np.uint16), "from 1 to 300 as uint16"),
        (gym.spaces.Box(-128, 127, (2,), np.int8), [200, 1], "from 1 to 200 as int64"),
        (gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), np.array([1e300, 0.0]), "0.0 to 1e[+]300 as float64"),
        (gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), [2**24 + 1, 0], "0 to 16777217 as int64"),
        (gym.spaces.Discrete(5, dtype=np.int8), 258, "258 to 258 as int64"),
        (gym.spaces.Box(-1, 1, (2,), np.float64), np.ma.array([1.0, 0.5], mask=[True, False]), "with masked elements"),
    ],
    ids=str,
)
def test_an_observation_that_its_dtype_would_change_is_refused(space: Any, observed: Any, named: str) -> None:
    spaces = Spaces(observation=convert(space, "seen"), action=convert(gym.spaces.Discrete(2), "done"))
    policy = TrainedPolicy(EnvRunnerConfig(env="CartPole-v1"), {"default_policy": spaces}, {})
    with pytest.raises(PolicyCallError, match=named):
        policy.act(observed)
    policy.act(np.array(space.sample(), space.dtype))


@pytest.mark.parametrize(
    ("module", "config", "told"),
    [
        ("actor_critic", {"hidden": [1] * 1_000_000}, r"4,097 arrays of 0 MiB with 'weight' \[1, 1\] of a Linear"),
        ("actor_critic", {"hidden": [10**8]}, r"2 arrays of 1,525 MiB|'weight' \[100000000, 4\]"),
        ("actor_critic", {"hidden": [10**14]}, "could not be built .RuntimeError"),
        ("actor_critic", {"hidden": [30_000, 30_000]}, "for its 0 weights, 4,096 of 256 MiB are allowed"),
        ("lstm_actor_critic", {"cell_size": 20_000}, "'weight_ih_l0'|'weight_hh_l0'"),
        pytest.param(
            "sb3:build",
            {"policy_kwargs": {"net_arch": {"pi": [1] * 1_000_000}}},
            "4,097 arrays of 0 MiB",
            marks=NEEDS_SB3,
        ),
        pytest.param(
            "sb3:build",
            {"policy_kwargs": {"net_arch": {"vf": [10**8]}}},
            r"'weight' \[100000000, 4\] of a Linear",
            marks=NEEDS_SB3,
        ),
    ],
    ids=["many", "wide", "wider", "squares", "cells", "many_sb3", "wide_sb3"],
)
def test_more_weights_than_a_worker_could_get_are_refused_before_they_take_memory(
    module: str, config: dict[str, Any], told: str
) -> None:
    """A stranger's settings beside a checkpoint may name layers of any size."""
    build = f"headrace.workers.modules{'.' if ':' in module else ':'}{module}"
    settings = EnvRunnerConfig(env="CartPole-v1", module=build, module_config=config)
    spaces = Spaces(
        observation=convert(gym.spaces.Box(-1, 1, (4,)), "seen"), action=convert(gym.spaces.Discrete(2), "done")
    )
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = memory_of(os.getpid())
    with pytest.raises(ModuleError, match=told):
        TrainedPolicy(settings, {"default_policy": spaces}, {})
    assert memory_of(os.getpid(), "VmHWM") < before + (150 << 20)
