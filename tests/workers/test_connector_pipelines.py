"""Connectors inside a runner: the rows that pass them, their errors, and their state, which goes with the weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import ConfigError, ConnectorError, ModuleError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.connectors import (
    ClipActions,
    Connector,
    FlattenObservations,
    FrameStack,
    MeanStd,
    PreviousActionReward,
    Rows,
    TimeOneHot,
    UnsquashActions,
)
from headrace.workers.envs import restarts
from support.envs.toy import Counting, Faulty, Walk, check_books, runner

ALL = [PreviousActionReward, partial(TimeOneHot, 4), FlattenObservations, MeanStd(), FrameStack(3)]


class Spy(Connector):
    """Lets rows pass and remembers them; `log` is shared by copies."""

    log: list[tuple[bool, int, tuple[float, ...]]]

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        return spaces

    def process(self, rows: Rows) -> Any:
        for lane, row in zip(rows.lanes.tolist(), rows.columns["obs"].tolist(), strict=True):
            self.log.append((rows.first, lane, tuple(row)))
        return {"obs": rows.columns["obs"] + np.float32(0)}


def spying() -> tuple[type[Spy], list[tuple[bool, int, tuple[float, ...]]]]:
    class Fresh(Spy):
        log: list[Any] = []  # noqa: RUF012 - shared on purpose

    return Fresh, Fresh.log


# -- what passes, and when ---------------------------------------------------------------------------------------------


def test_each_observation_passes_once_also_if_terminal_or_at_a_cut() -> None:
    spy, log = spying()
    with runner(num_envs=2, env_config={"lengths": {0: 3, 1: 5}}, env_to_module=[spy]) as sampler:
        for polls in (2, 1, 4):
            sampler.sample(num_timesteps=2 * polls)
        sampler.sample(num_timesteps=2, random_actions=True)
        log_before_episodes = len(log)
        assert log_before_episodes == 2 * 8 + 2 + 3  # a step each, and a reset each at first and after each end
        sampler.sample(num_episodes=2)
    frames = Counter(log[:log_before_episodes])
    lane_0 = [(t, frames[first, 0, (float(t), 0.0)]) for first, t in ((True, 0), (False, 1), (False, 2), (False, 3))]
    assert lane_0 == [(0, 3), (1, 3), (2, 3), (3, 2)]


@pytest.mark.parametrize("elsewhere", [{}, {"env_placement": "process", "remote_env_batch_wait_ms": 0}])
def test_the_terminal_observation_passes_before_on_episode_end(elsewhere: dict[str, Any]) -> None:
    spy, log = spying()
    ended: list[int] = []

    def look(episode: Any, env_index: int) -> None:
        ended.append(env_index)
        last = (False, env_index, (float(len(episode)), float(env_index)))
        assert log.count(last) == ended.count(env_index), "each has passed, this one's too"

    settings = {"env_config": {"length": 3}, "callbacks": [{"on_episode_end": look}], **elsewhere}
    with runner("support.envs.counting:Counting", num_envs=2, env_to_module=[spy], **settings) as sampler:
        sampler.sample(num_timesteps=40)
        assert sampler.totals.discarded == {}, "no callback has raised"
    assert {0, 1} <= set(ended)


def test_chunks_hold_the_connectors_observations_across_cuts() -> None:
    scale = 0.5

    class Half(Connector):
        def connect(self, spaces: Spaces, width: int) -> Spaces:
            return Spaces(observation=Box(shape=(2,), dtype="<f8"), action=spaces.action)

        def process(self, rows: Rows) -> Any:
            return {"obs": rows.columns["obs"].astype(np.float64) * scale}

    with runner(num_envs=2, env_config={"lengths": {0: 3, 1: 100}}, env_to_module=[Half]) as sampler:
        assert sampler.spaces.observation == Box(shape=(2,), dtype="<f8")
        assert sampler.get_spaces()["default_policy"][0] == Counting.observation_space
        for n in (4, 6, 2):
            for c in sampler.sample(num_timesteps=n):
                assert c.obs.dtype == np.float64
                np.testing.assert_array_equal(c.obs[:, 0], np.arange(c.t_start, c.t_start + len(c) + 1) * scale)


def naive(raw: list[Any], actions: Any, rewards: Any, frames: int) -> list[Any]:
    """The pipeline of the test below, as a loop over one episode."""
    rows = []
    for t, frame in enumerate(raw):
        action = np.eye(3, dtype=np.float32)[actions[t - 1]] if t else np.zeros(3, np.float32)
        reward = np.float32([rewards[t - 1] if t else 0])
        rows.append(np.concatenate([frame, action, reward, np.eye(4, dtype=np.float32)[min(t, 3)]]))
    padded = [rows[0]] * (frames - 1) + rows
    return [np.concatenate(padded[t : t + frames]) for t in range(len(rows))]


@pytest.mark.parametrize("sizes", [(40,), (1, 2, 3, 5, 8, 21), (4,) * 10])
def test_a_stateful_pipeline_equals_a_loop_over_each_episode(sizes: tuple[int, ...]) -> None:
    pieces = [PreviousActionReward, partial(TimeOneHot, 4), FlattenObservations, FrameStack(3)]
    lengths = {0: 3, 1: 7, 2: 1}
    with runner(num_envs=3, env_config={"lengths": lengths}, env_to_module=pieces) as sampler:
        lived = defaultdict(list)
        for polls in sizes:
            for chunk in sampler.sample(num_timesteps=3 * polls):
                lived[chunk.episode_id].append(chunk)
    for chunks in lived.values():
        chunks.sort(key=lambda chunk: chunk.chunk_index)
        actions = np.concatenate([chunk.actions for chunk in chunks])
        rewards = np.concatenate([chunk.rewards for chunk in chunks])
        raw = [np.float32([t, chunks[0].env_index]) for t in range(len(rewards) + 1)]
        expected = naive(raw, actions, rewards, 3)
        for chunk in chunks:
            np.testing.assert_array_equal(chunk.obs, expected[chunk.t_start : chunk.t_start + len(chunk) + 1])


@pytest.mark.parametrize("backoff_s", [0.0, 0.004])
def test_siblings_of_failing_envs_are_the_same_to_the_bit_with_connectors_on(
    backoff_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", backoff_s)

    def live(faulty: set[int]) -> dict[int, list[Any]]:
        config = {"fault": diverge, "faulty": faulty, "every": 7, "steps": {}}
        settings = {"env_restart_attempts": 100, "rollout_fragment_length": 40}
        with runner(Faulty, num_envs=6, env_config=config, env_to_module=ALL, **settings) as sampler:
            lives = defaultdict(list)
            for _ in range(8):
                for chunk in sampler.sample_fragment():
                    lives[chunk.env_index].append(chunk)
            assert bool(faulty) == bool(sampler.totals.env_failures)
            check_books(sampler)
        return lives

    expected, lives = live(set()), live({1, 4})
    for index in (0, 2, 3, 5):
        for a, b in zip(expected[index], lives[index], strict=True):
            assert (a.episode_id, a.t_start, a.end) == (b.episode_id, b.t_start, b.end)
            assert a.obs.tobytes() == b.obs.tobytes()
            assert a.actions.tobytes() == b.actions.tobytes()
            assert a.columns["logp"].tobytes() == b.columns["logp"].tobytes()


def diverge(answer: Any) -> Any:
    raise RuntimeError("diverged")


def test_a_rebuilt_env_begins_with_fresh_episode_state() -> None:
    config = {"fault": diverge, "faulty": {0}, "every": 6, "steps": {}}
    with runner(Faulty, num_envs=2, env_config=config, env_to_module=[FrameStack(2)]) as sampler:
        born = [c for c in sampler.sample(num_timesteps=28) if c.env_index == 0 and c.t_start == 0]
    assert born
    for chunk in born:
        np.testing.assert_array_equal(chunk.obs[0, :3], chunk.obs[0, 3:])


# -- actions -----------------------------------------------------------------------------------------------------------


class Recording(Counting):
    action_space = gym.spaces.Box(np.float32([0, -4]), np.float32([2, 4]), dtype=np.float32)
    got: list[Any]

    def step(self, action: Any) -> Any:
        self.got.append(np.array(action))
        return super().step(action)


def recording() -> tuple[type[Recording], list[Any]]:
    class Fresh(Recording):
        got: list[Any] = []  # noqa: RUF012 - shared on purpose

    return Fresh, Fresh.got


class Raw(torch.nn.Module):
    """Answers its noise as its action, and nothing about the env's bounds."""

    noise_size, noise_kind = 2, "normal"

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": batch["noise"].clone()}

    forward_inference = forward_train = forward_exploration


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (UnsquashActions, lambda a: np.clip(a * np.float32([1, 4]) + np.float32([1, 0]), [0, -4], [2, 4])),
        (ClipActions, lambda a: np.clip(a, [0, -4], [2, 4])),
    ],
)
def test_the_policys_action_is_stored_and_the_mapped_one_sent(piece: Any, expected: Any) -> None:
    env, got = recording()
    with runner(env, env_config={"length": 50}, module_to_env=[piece], module=lambda spaces: Raw()) as sampler:
        (chunk,) = sampler.sample(num_timesteps=30)
    assert np.abs(chunk.actions).max() > 1.5
    np.testing.assert_allclose(chunk.columns["actions_for_env"], expected(chunk.actions), rtol=1e-6)
    np.testing.assert_array_equal(chunk.columns["actions_for_env"], np.stack(got))


def test_unsquash_actions_changes_no_action_of_the_default_module() -> None:
    def sent(**settings: Any) -> Any:
        with runner(recording()[0], env_config={"length": 50}, **settings) as sampler:
            return sampler.sample(num_timesteps=30)[0].columns["actions_for_env"]

    np.testing.assert_array_equal(sent(), sent(module_to_env=[UnsquashActions]))


class Levels(Connector):
    """The module chooses one of five levels for a Box action of two."""

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        return Spaces(observation=spaces.observation, action=Discrete(n=5))

    def process(self, rows: Rows) -> Any:
        level = rows.columns["actions"].astype(np.float32) / 4
        return {"actions": np.stack([level, level], axis=1)}


def test_a_connector_may_change_the_action_space_also_of_random_actions() -> None:
    env, got = recording()
    settings = {"env_config": {"length": 50}, "module_to_env": [Levels, ClipActions]}
    with runner(env, env_to_module=[PreviousActionReward], **settings) as sampler:
        assert sampler.spaces.action == Discrete(n=5)
        for random_actions in (False, True):
            got.clear()
            (chunk, *_) = sampler.sample(num_timesteps=20, random_actions=random_actions, force_reset=True)
            assert chunk.actions.shape == (20,)
            np.testing.assert_array_equal(np.stack(got)[:, 0], chunk.actions / np.float32(4))
            np.testing.assert_array_equal(chunk.obs["prev_action"][1:].argmax(1), chunk.actions)


def unsquashed(actions: Any) -> Any:
    return np.clip(actions * np.float32([1, 4]) + np.float32([1, 0]), [0, -4], [2, 4])


def clipped(actions: Any) -> Any:
    return np.clip(actions, [0, -4], [2, 4])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, unsquashed),
        ({"module_to_env": [UnsquashActions]}, unsquashed),
        ({"module_to_env": [UnsquashActions], "module": lambda spaces: Raw()}, unsquashed),
        ({"module_to_env": [ClipActions], "module": lambda spaces: Raw()}, clipped),
    ],
    ids=["the module maps", "both map", "a connector maps", "a connector clips"],
)
def test_random_actions_are_stored_in_the_units_of_the_policys_actions(settings: dict[str, Any], expected: Any) -> None:
    env, got = recording()
    with runner(env, env_config={"length": 50}, **settings) as sampler:
        for random_actions in (False, True):
            got.clear()
            chunks = sampler.sample(num_timesteps=200, random_actions=random_actions, force_reset=True)
            sent = np.concatenate([chunk.columns["actions_for_env"] for chunk in chunks])
            actions = np.concatenate([chunk.actions for chunk in chunks])
            assert actions.dtype == np.float32
            np.testing.assert_array_equal(sent, np.stack(got))
            np.testing.assert_allclose(sent, expected(actions), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([sent.min(0), sent.max(0)], [[0, -4], [2, 4]], atol=0.2)


# -- failures ----------------------------------------------------------------------------------------------------------


class Failing(Connector):
    fails_at = 3

    def __init__(self) -> None:
        self.calls = 0

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        return spaces

    def process(self, rows: Rows) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ZeroDivisionError("no mass")
        return dict(rows.columns)


@pytest.mark.parametrize("setting", ["env_to_module", "module_to_env"])
def test_a_connectors_exception_names_the_connector_and_its_lanes(setting: str) -> None:
    with runner(num_envs=2, **{setting: [Failing]}) as sampler:
        with pytest.raises(ConnectorError, match=r"\(Failing\) failed: ZeroDivisionError: no mass") as caught:
            sampler.sample(num_timesteps=20)
        assert setting in caught.value.connector
        assert "rows of lanes [0, 1]" in caught.value.seen
        check_books(sampler)
        left = sampler.totals.open  # where actions failed nothing was stepped, and nothing is lost
        assert bool(left) == (setting == "module_to_env")
        assert sum(map(len, sampler.sample(num_timesteps=8))) == left + 8
        check_books(sampler)


def test_a_connector_that_fails_at_a_reset_keeps_the_totals_consistent() -> None:
    class FailingLater(Failing):
        fails_at = 7  # of 2 + 4 steps' and the first reset's, the one after an episode's end

    with runner(env_config={"length": 5}, env_to_module=[FailingLater]) as sampler:
        with pytest.raises(ConnectorError, match="first rows of lanes"):
            sampler.sample(num_timesteps=9)
        check_books(sampler)
        assert sampler.totals.discarded == {"reset": 5}
        assert sum(map(len, sampler.sample(num_timesteps=4))) == 4


def test_after_a_connector_and_an_env_fail_in_one_poll_all_episodes_restart() -> None:
    class FailingWithEnv(Failing):
        fails_at = 4  # the first reset, two polls, and the one in which env 1 fails

    config = {"fault": diverge, "faulty": {1}, "every": 3, "steps": {}}
    with runner(Faulty, num_envs=3, env_config=config, env_to_module=[FailingWithEnv, FrameStack(2)]) as sampler:
        with pytest.raises(ConnectorError, match="rows of lanes"):
            sampler.sample(num_timesteps=30)
        assert sampler.totals.open == 0
        chunks = sampler.sample(num_timesteps=6)
        assert [(chunk.env_index, chunk.t_start, len(chunk)) for chunk in chunks] == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
        assert sampler.totals.env_rebuilds == 1
        check_books(sampler)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ({"obs": np.zeros((1, 3), np.float32)}, r"float32 \(1, 2\), and is float32 \(1, 3\)"),
        ({"obs": np.zeros((1, 2))}, "and is float64"),
        ({"state": np.zeros((1, 2), np.float32)}, r"it gave \['state'\], not \['obs'\]"),
        (None, "it gave NoneType"),
    ],
)
def test_connector_output_that_does_not_fit_its_declared_space_is_refused(answer: Any, match: str) -> None:
    class Wrong(Failing):
        def process(self, rows: Rows) -> Any:
            return answer

    with runner(env_to_module=[Wrong]) as sampler, pytest.raises(ConnectorError, match=match):
        sampler.sample(num_timesteps=2)


def test_connectors_are_given_as_objects_factories_or_import_paths() -> None:
    given = FrameStack(2)
    path = "headrace.workers.connectors:FlattenObservations"
    with runner(env_to_module=[path, given, partial(TimeOneHot, 3)]) as sampler:
        assert [type(p).__name__ for p in sampler._sampler.steps._policy.connectors._inward.pieces] == [
            "FlattenObservations", "FrameStack", "TimeOneHot",
        ]  # fmt: skip
        sampler.sample(num_timesteps=3)
    assert not hasattr(given, "_kept"), "each runner has a copy"


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        (3, ConfigError, r"env_to_module\[0\]: 3 is no connector"),
        (dict, ConfigError, "gave a dict, not a Connector"),
        ("nowhere:piece", ConfigError, "cannot be imported"),
        (lambda: 1 / 0, ConnectorError, "ZeroDivisionError"),
    ],
)
def test_a_spec_that_gives_no_connector_raises_an_error_with_the_reason(
    spec: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        runner(env_to_module=[spec])


def test_connect_must_give_spaces() -> None:
    class Spaceless(Failing):
        def connect(self, spaces: Spaces, width: int) -> Any:
            return None

    with pytest.raises(ConnectorError, match="connect gave a NoneType"):
        runner(env_to_module=[Spaceless])


# -- state -------------------------------------------------------------------------------------------------------------


def test_state_goes_through_get_and_set_and_is_one_version_with_the_weights() -> None:
    settings: dict[str, Any] = {"num_envs": 3, "env_config": {}, "env_to_module": [MeanStd]}
    with runner(Walk, **settings) as sampler, runner(Walk, worker_index=1, **settings) as other:
        sampler.sample(num_timesteps=60)
        sampler.set_weights(sampler.get_state()["rl_module"], seq=3, learner_epoch=1)
        state = sampler.get_state()
        assert set(state["env_to_module"]) == {f"0.MeanStd/obs/{part}" for part in ("count", "mean", "m2")}
        assert state["env_to_module"]["0.MeanStd/obs/count"] >= 60
        other.set_state(state)
        same = other.get_state()
        assert other.weights_version == (1, 3)
        for name, array in state["env_to_module"].items():
            np.testing.assert_array_equal(same["env_to_module"][name], array)
        stale = {name: array + 1 for name, array in state["env_to_module"].items()}
        other.set_state({**state, "env_to_module": stale, "weights_seq_no": 2})
        for name, array in state["env_to_module"].items():
            np.testing.assert_array_equal(other.get_state()["env_to_module"][name], array)
        other.set_state({"env_to_module": stale})
        assert other.get_state()["env_to_module"]["0.MeanStd/obs/count"] == stale["0.MeanStd/obs/count"]


def test_merged_updates_of_several_runners_go_with_the_weights_in_one_mapping() -> None:
    settings: dict[str, Any] = {"num_envs": 2, "env_config": {}, "env_to_module": [MeanStd]}
    spies = [spying() for _ in range(2)]
    samplers = [
        runner(Walk, worker_index=i, **{**settings, "env_to_module": [spy, MeanStd]})
        for i, (spy, _) in enumerate(spies)
    ]
    merged: dict[str, Any] = {}
    for seq in (1, 2):
        for sampler in samplers:
            sampler.sample(num_timesteps=50)
        merged = samplers[0].merge_connector_updates(merged, [sampler.take_connector_update() for sampler in samplers])
        for sampler in samplers:
            weights = sampler.get_state()["rl_module"]
            sampler.set_weights({**weights, **merged}, seq=seq)
        everything = np.array([row for _, log in spies for _, _, row in log])
        known = samplers[1].get_state()["env_to_module"]
        assert known["1.MeanStd/obs/count"] == len(everything)
        np.testing.assert_allclose(known["1.MeanStd/obs/mean"], everything.mean(0), rtol=1e-9)
        np.testing.assert_allclose(known["1.MeanStd/obs/m2"], everything.var(0) * len(everything), rtol=1e-9)
    for sampler in samplers:
        sampler.stop()


def test_weights_and_connector_state_are_taken_together_or_not_at_all() -> None:
    with runner(Walk, env_config={}, env_to_module=[MeanStd]) as sampler:
        before = sampler.get_state()
        weights = {name: array + 1 for name, array in before["rl_module"].items()}
        learnt = before["env_to_module"]
        good = {f"connectors/env_to_module/{name}": array + 5 for name, array in learnt.items()}
        bad = {**good, "connectors/env_to_module/0.MeanStd/obs/mean": np.zeros(9)}
        with pytest.raises(ConnectorError, match=r"obs/mean' should be float64 \(3,\), and is float64 \(9,\)"):
            sampler.set_weights({**weights, **bad}, seq=5)
        masked = {"connectors/env_to_module/0.MeanStd/obs/mean": np.ma.array(np.zeros(3), mask=[True, False, False])}
        with pytest.raises(ConnectorError, match=r"obs/mean' should be float64 \(3,\), and is masked float64 \(3,\)"):
            sampler.set_weights({**weights, **good, **masked}, seq=5)
        with pytest.raises(ConnectorError, match="unknown"):
            sampler.set_weights({**weights, **good, "connectors/env_to_module/1.X/y": np.zeros(1)}, seq=5)
        with pytest.raises(ModuleError, match="do not fit"):
            sampler.set_weights(good, seq=5)
        after = sampler.get_state()
        assert sampler.weights_version == (0, 0)
        for key in ("rl_module", "env_to_module"):
            for name, array in before[key].items():
                np.testing.assert_array_equal(after[key][name], array)
        sampler.set_weights({**weights, **good}, seq=5)
        assert sampler.get_state()["env_to_module"]["0.MeanStd/obs/count"] == 5


def test_connector_state_survives_a_rebuild_of_envs_of_the_same_spaces() -> None:
    with runner(num_envs=2, env_to_module=[MeanStd]) as sampler:
        sampler.sample(num_timesteps=20)
        count = sampler.get_state()["env_to_module"]["0.MeanStd/obs/count"]
        sampler.make_env()
        assert sampler.get_state()["env_to_module"]["0.MeanStd/obs/count"] == count > 0
        sampler.sample(num_timesteps=4)


def test_a_runner_without_env_has_no_connector_state() -> None:
    with SingleAgentEnvRunner(EnvRunnerConfig(env_to_module=[MeanStd])) as sampler:
        assert "env_to_module" not in sampler.get_state()
