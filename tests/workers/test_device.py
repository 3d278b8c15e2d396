"""Policies on another device than the CPU, by a stand-in that computes here, counts copies, and mixes no devices."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import ConfigError, ModuleError
from headrace.workers.devices.open_device import OpenDevice, open_device
from headrace.workers.policy.acting import Actor, BlockActor
from headrace.workers.policy.module_weights import read_weights, write_weights
from support.envs.external import Serving
from support.envs.toy import Counting, Walk, runner
from support.envs.toy_agents import multi_runner
from support.runners.recurrent import LSTM, Ages
from support.runners.stand_in_device import Counts, StandIn, StandInDevice, stand_in

POLL = Counts(there=1, back=1, waits=1)
APART: dict[str, Any] = {"module": "headrace.workers.modules:actor_critic", "module_config": {"vf_share_layers": False}}
"""The default policy in a form that torch computes on the CPU too."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in(monkeypatch) as mode:
        yield mode


class Sampling(torch.nn.Module):
    """A user's module, which samples by torch and answers columns of several dtypes."""

    noise_size, noise_kind = 2, "uniform"

    def __init__(self, spaces: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = self.layer(batch["obs"])
        actions = (batch["noise"][:, 0] < torch.sigmoid(outputs[:, 0])).long()
        told = {"flag": actions == 1, "small": outputs.half(), "t": torch.full_like(actions, batch["t"])}
        return {"actions": actions, "values": outputs[:, 1].double(), **told}

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": (self.layer(batch["obs"])[:, 0] > 0).long()}


class Remembering(Sampling):
    """Has a memory, whose initial state is learnt, and answers it as a column too."""

    def __init__(self, spaces: Any) -> None:
        super().__init__(spaces)
        self.begin = torch.nn.Parameter(torch.ones(2))

    def initial_state(self) -> dict[str, torch.Tensor]:
        return {"h": self.begin, "steps": torch.tensor(100)}

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        h, steps = batch["state_in"]["h"], batch["state_in"]["steps"]
        h = torch.tanh(self.layer(batch["obs"]) + h)
        actions = (batch["noise"][:, 0] < torch.sigmoid(h[:, 0])).long()
        return {"actions": actions, "had": batch["state_in"]["h"], "state_out": {"h": h, "steps": steps + 1}}


def lived(chunks: Iterable[Any]) -> dict[Any, Any]:
    """Return the bytes of each step's columns by (episode, step), and those of each chunk's state."""
    found: dict[Any, Any] = {}
    for chunk in chunks:
        state = {name: row.tobytes() for name, row in chunk.state_in.items()}
        found[chunk.episode_id, "state", chunk.t_start] = state
        for i in range(len(chunk)):
            columns = {name: (rows.dtype, rows[i].tobytes()) for name, rows in chunk.columns.items()}
            found[chunk.episode_id, chunk.t_start + i] = columns
    return found


KINDS: dict[str, dict[str, Any]] = {
    "actor-critic": APART,
    "own module": {"module": Sampling},
    "mode": {"module": Sampling, "explore": False},
    "memory": {"module": Remembering},
}
HALVES = {"env_placement": "process", "envs_per_process": 2, "double_buffering": True}


@pytest.mark.parametrize("kind", [*KINDS, "halves"])
def test_steps_equal_those_of_the_cpu_to_the_bit(kind: str, device: StandIn) -> None:
    settings = {"num_envs": 4, "rollout_fragment_length": 7, **KINDS.get(kind, {"module": Remembering, **HALVES})}
    seen = []
    for place in ("cpu", "cuda"):
        torch.manual_seed(0)
        with runner(Walk, device=place, **settings) as sampler:
            seen.append(lived(chunk for _ in range(4) for chunk in sampler.sample_fragment()))
    here, there = seen
    both = here.keys() & there.keys()  # halves end a fragment when they like
    assert len(both) > 100
    assert {key: here[key] for key in both} == {key: there[key] for key in both}


@pytest.mark.parametrize("kind", [*KINDS, "lstm", "ages"])
def test_a_poll_is_one_copy_there_and_one_back_and_one_wait(kind: str, device: StandIn) -> None:
    kinds: dict[str, Any] = {**KINDS, "lstm": {"module": LSTM}, "ages": {"module": Ages}}
    with runner(Walk, device="cuda", num_envs=3, rollout_fragment_length=6, **kinds[kind]) as sampler:
        sampler.sample_fragment()
        device.take()
        counts: list[Counts] = []
        sampler.sample_fragment(lambda: counts.append(device.take()))
        seam = hasattr(sampler.module, "initial_state")  # the chunks' state, of all envs at once
    assert counts == [Counts(there=1, back=1 + seam, waits=1 + seam), *[POLL] * 5]


def test_the_stand_in_counts_a_copy_that_a_module_hides(device: StandIn) -> None:
    class Looks(Sampling):
        def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
            assert batch["obs"].sum().item() == batch["obs"].sum().item()
            return super().forward_inference(batch)

    with runner(Walk, device="cuda", module=Looks, explore=False, rollout_fragment_length=2) as sampler:
        sampler.sample_fragment()
        device.take()
        sampler.sample(num_timesteps=1)
    assert device.take() == Counts(there=1, back=3, waits=3)


def test_a_version_of_weights_is_one_copy_and_the_next_step_is_by_it(device: StandIn) -> None:
    with runner(Walk, device="cuda", num_envs=2, module=Remembering) as sampler:
        own = {name: array * 0 for name, array in sampler.get_state()["rl_module"].items()}
        for seq in range(1, 6):
            device.take()
            sampler.set_weights({**own, "begin": np.full(2, seq, np.float64)}, seq)
            assert device.take() == Counts(there=1)
            assert sampler.get_state()["rl_module"]["begin"].tolist() == [seq, seq]
            for chunk in sampler.sample(num_timesteps=4, force_reset=True):
                assert set(chunk.weights_seq) == {seq}
                assert chunk.state_in["h"].tolist() == [seq, seq]
                assert chunk.columns["had"][0].tolist() == [seq, seq]
        with pytest.raises(ModuleError, match="begin"):
            sampler.set_weights({**own, "begin": np.zeros(3, np.float32)}, 9)
        assert sampler.weights_version == (0, 5)


def test_episodes_of_new_seats_and_old_ones_keep_their_memory(device: StandIn) -> None:
    with multi_runner(num_envs=2, env_config={"lengths": [3, 9]}, module=Ages, device="cuda") as sampler:
        chunks = [chunk for _ in range(6) for chunk in sampler.sample(num_timesteps=4)]
    assert len({chunk.agent_id for chunk in chunks}) > 1
    for chunk in chunks:
        assert chunk.state_in["age"] == 100 + chunk.t_start
        np.testing.assert_array_equal(chunk.columns["age"], 100 + chunk.t_start + np.arange(len(chunk)))


class Masked(Walk):
    """Masks one of two actions, and observes numbers that do not start at 0."""

    observation_space = gym.spaces.Dict(
        {
            "action_mask": gym.spaces.Dict({"left": gym.spaces.MultiBinary(2)}),
            "kind": gym.spaces.MultiDiscrete([2, 3], start=[1, -1]),
        }
    )
    action_space = gym.spaces.Dict({"left": gym.spaces.Discrete(2), "right": gym.spaces.Discrete(3)})

    def observe(self) -> Any:
        mask = np.array([self.t % 2, 1 - self.t % 2], np.int8)
        return {"action_mask": {"left": mask}, "kind": np.array([1, self.t % 3 - 1])}

    def step(self, action: Any) -> Any:
        return super().step(action["right"])


def test_masks_and_choices_cost_no_copy_of_their_own(device: StandIn) -> None:
    with runner(Masked, device="cuda", num_envs=2, rollout_fragment_length=4) as sampler:
        sampler.sample_fragment()
        device.take()
        counts: list[Counts] = []
        (chunk, *_) = sampler.sample_fragment(lambda: counts.append(device.take()))
    assert counts == [POLL] * 4
    legal = chunk.obs["action_mask"]["left"][: len(chunk)].argmax(1)
    np.testing.assert_array_equal(chunk.actions["left"], legal)


def test_a_module_that_cannot_move_says_what_to_do(device: StandIn) -> None:
    class Stays(Sampling):
        def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"actions": (batch["obs"] * torch.ones(3)).sum(1).long()}

    with (
        runner(Walk, device="cuda", module=Stays) as sampler,
        pytest.raises(ModuleError, match=r"same device.*moved it to meta.*parameters or buffers.*device = 'cpu'"),
    ):
        sampler.sample(num_timesteps=1)


@pytest.mark.parametrize(
    ("asked", "built", "count", "words"),
    [
        ("cuda", False, 0, r"'cuda' cannot be used here: torch \S+ is built without CUDA; install .* or take 'cpu'"),
        ("cuda:1", True, 0, "'cuda:1' cannot be used here: torch .* sees no device; look at what nvidia-smi"),
        ("cuda:2", True, 2, "'cuda:2' cannot be used here: torch sees 2 devices, cuda:0 to cuda:1; take one of them"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_an_env_is_built(
    asked: str, built: bool, count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    built_envs: list[Any] = []
    with pytest.raises(ConfigError, match=f"sampling.device: {words}"):
        runner(lambda context: built_envs.append(context) or Counting(context), device=asked)
    assert not built_envs


def test_auto_is_the_cpu_where_there_is_no_cuda_and_cuda_where_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_device("auto") is None
    assert open_device("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    found = [open_device(name) for name in ("auto", "cuda", "cuda:1")]
    assert [str(device.place) for device in found if device is not None] == ["cuda:2", "cuda:2", "cuda:1"]


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "mps", "CUDA", "cuda:1\n", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"device = {name!r} is none of 'cpu', 'auto', 'cuda'")):
        runner(Walk, device=name)


@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "DQN", "SAC"])
def test_policies_of_stable_baselines3_act_there(algorithm: str, device: StandIn) -> None:
    pytest.importorskip("stable_baselines3")
    settings: dict[str, Any] = {
        "env": "CartPole-v1" if algorithm == "DQN" else "Pendulum-v1",
        "module": "headrace.workers.modules.sb3:build",
        "module_config": {"algorithm": algorithm},
        "rollout_fragment_length": 3,
    }
    seen = []
    for place in ("cpu", "cuda"):
        torch.manual_seed(0)
        with runner(device=place, **settings) as sampler:
            device.take()
            counts: list[Counts] = []
            seen.append(lived(sampler.sample_fragment(lambda: counts.append(device.take()))))  # noqa: B023
            random = sampler.sample(num_timesteps=2, random_actions=True)[0]
    assert seen[0] == seen[1]
    looks = 3 * (algorithm in ("PPO", "A2C"))  # torch's distributions look at what they are given
    assert counts == [Counts(there=1, back=1 + looks, waits=1 + looks)] * 3
    assert np.isfinite(random.actions).all()


class Logging(Sampling):
    """Its log-probs are by its parameters."""

    noise_size = 1

    def __init__(self, spaces: Any) -> None:
        super().__init__(spaces)
        self.layer = torch.nn.Linear(2, 100)

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        logits = self.layer(batch["obs"] * 0)
        actions = (batch["noise"][:, 0] * 100).long()
        return {"actions": actions, "action_dist_inputs": logits, "logp": self.logp(logits, actions)}

    def logp(self, inputs: Any, actions: Any) -> Any:
        return (inputs + self.layer.bias).log_softmax(-1).gather(-1, actions[:, None])[:, 0]


def test_logged_actions_and_columns_of_clients_work_with_a_module_there(device: StandIn) -> None:
    with runner(Serving, num_envs=1, env_config={"logged": 7}, module=Logging, device="cuda") as sampler:
        kinds = sampler.policy_columns()["default_policy"].kinds
        chunk = next(chunk for chunk in sampler.sample(num_timesteps=30) if chunk.columns["off_policy"].any())
        module: Any = sampler.module
        (row,) = np.flatnonzero(chunk.columns["off_policy"])[:1]
        due = (2 * module.layer.bias).log_softmax(-1).numpy(force=True)
    assert kinds["logp"] == (np.dtype(np.float32), ())
    assert chunk.columns["logp"][row] == pytest.approx(due[7])


SPACES = Spaces(observation=Box(shape=(3,), dtype="<f4"), action=Discrete(n=2))


@pytest.mark.parametrize("blocks", [(), ([0, 2, 4], [1, 3])], ids=["whole passes", "blocks"])
def test_memory_there_does_what_memory_here_does(blocks: Any, device: StandIn) -> None:
    """Two actors live through the same resets, passes of some lanes, weights and new lanes."""
    torch.manual_seed(0)
    random, width = np.random.default_rng(0), 5
    here, place = Remembering(None), OpenDevice(StandInDevice(device))
    there = copy.deepcopy(here)
    columns = {"obs": np.zeros((width, 3), np.float32)}
    parts = ([np.array(block) for block in blocks],) if blocks else ()
    make: Any = BlockActor if blocks else Actor
    actors = [make(here, SPACES, columns, int, *parts), make(there, SPACES, columns, int, *parts, device=place)]
    kept: list[list[Any]] = []
    given: list[dict[int, Any]] = [{}, {}]
    for actor in actors:
        actor.memory.reset(range(width))
    begun = set(range(width))
    for _ in range(150):
        columns["obs"][...] = random.normal(size=columns["obs"].shape)
        noise = random.random((width, 2), dtype=np.float32)
        lanes = np.flatnonzero(random.random(width) < 0.6)
        match random.integers(5):
            case 0:
                for actor, own in zip(actors, given, strict=True):
                    actor.memory.reset(lanes)
                    own.update({lane: actor.memory.of(lane) for lane in lanes.tolist()[::2]})
                begun |= set(lanes.tolist())
            case 1:
                weights = {name: random.normal(size=array.shape) for name, array in read_weights(here).items()}
                write_weights(here, weights)
                place.write_weights(there, weights)
            case 2 if not blocks and width < 9:
                width += 1
                columns = {"obs": np.concatenate((columns["obs"], np.zeros((1, 3), np.float32)))}
                wider = [Actor(here, SPACES, columns, int), Actor(there, SPACES, columns, int, device=place)]
                for new, old in zip(wider, actors, strict=True):
                    assert new.memory is not None
                    new.memory.follow(old.memory)
                    new.memory.reset([width - 1])
                actors = wider
                begun.add(width - 1)
            case _ if len(lanes):
                acting = None if len(lanes) == width else lanes
                answers = [actor(noise, acting) for actor in actors]
                kept.append([{name: rows[lanes] for name, rows in answer.items()} for answer in answers])
                kept.append([{lane: own.pop(lane) for lane in lanes.tolist() if lane in own} for own in given])
                kept.append([answers[1]["had"], answers[1]["had"].copy()])  # no later pass writes there
                kept.append([actor.memory.of(int(lanes[0]), before=True) for actor in actors])
                begun -= set(lanes.tolist())
                kept.append([[actor.memory.of(lane) for lane in {*range(width)} - begun] for actor in actors])
    assert len(kept) > 200
    for ours, theirs in kept:
        assert repr(ours) == repr(theirs)
