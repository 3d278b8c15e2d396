"""The learner merges connector updates exactly once each, in any order of arrival, and across restarts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.learner_stub import ConnectorMerger
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ConfigError, ConnectorError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.connectors import Connector, FlattenObservations, MeanStd

MakeBatch = Callable[..., ChunkBatch]

MEAN_STD = "headrace.workers.connectors:MeanStd"
STATE = "connectors/env_to_module/1.MeanStd/obs/"


class Noted(gym.Env[Any, Any]):
    """A random walk far from zero; notes each observation it gives."""

    observation_space = gym.spaces.Dict({"at": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, notes: list[NDArray[np.float32]]) -> None:
        self.notes = notes

    def _seen(self) -> dict[str, Any]:
        self.notes.append(self.at.copy())
        return {"at": self.at.copy()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = self.np_random.normal(1e3, 30.0, 2).astype(np.float32)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at = self.at + self.np_random.normal(size=2).astype(np.float32)
        return self._seen(), 1.0, bool(self.np_random.random() < 0.05), False, {}


class Broken(MeanStd):
    def merge(self, state: Any, updates: Any) -> Any:
        raise RuntimeError("no")


class Counted:
    """A user's own piece: adds up; gives back the very arrays it was given when there is nothing to add to."""

    def merge(self, state: dict[str, Any], updates: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"n": state["n"] + updates[0]["n"]} if state else updates[0]


class Offset(Connector):
    """Has state that outlives episodes, and never learns."""

    def __init__(self) -> None:
        self.offset = np.zeros(1)

    def connect(self, spaces: Any, width: int) -> Any:
        return spaces

    def process(self, rows: Any) -> Any:
        return rows.columns

    def get_state(self) -> dict[str, Any]:
        return {"offset": self.offset.copy()}

    def set_state(self, state: Any) -> None:
        self.offset = np.array(state["offset"])


def make_broken() -> Any:
    raise RuntimeError("no luck")


def _runner(notes: list[NDArray[np.float32]], seed: int, *more: Any) -> SingleAgentEnvRunner:
    return SingleAgentEnvRunner(
        EnvRunnerConfig(
            env=lambda _: Noted(notes),
            num_envs=3,
            seed=seed,
            rollout_fragment_length=8,
            env_to_module=[FlattenObservations, MeanStd, *more],
        ),
        worker_index=seed,
    )


def _sampled(runner: SingleAgentEnvRunner, *, random_actions: bool = False) -> ChunkBatch:
    """A batch and what was learnt while it was sampled."""
    batch = runner.sample(num_timesteps=24, random_actions=random_actions)
    assert isinstance(batch, ChunkBatch)
    left = runner.take_connector_update()
    untold = {f"{key}/{name}": array for key, part in left.items() for name, array in part.items()}
    return replace(batch, connector_update={**batch.connector_update, **untold})


def _check_moments(state: dict[str, NDArray[Any]], notes: list[NDArray[np.float32]]) -> None:
    rows = np.array(notes, np.float64)
    deviations = ((rows - rows.mean(0)) ** 2).sum(0)
    np.testing.assert_array_equal(state[STATE + "count"].ravel(), len(rows))
    np.testing.assert_allclose(state[STATE + "mean"], rows.mean(0), rtol=1e-9)
    np.testing.assert_allclose(state[STATE + "m2"], deviations, rtol=1e-9)


def test_merged_updates_equal_the_moments_of_all_rows_at_once() -> None:
    notes: list[NDArray[np.float32]] = []
    merger = ConnectorMerger([FlattenObservations, {"build": MEAN_STD, "config": {"clip": 5.0}}])
    with _runner(notes, 0) as one, _runner(notes, 1) as other:
        batches = [_sampled(runner, random_actions=i == 0) for i in range(12) for runner in (one, other)]
        for batch in np.random.default_rng(0).permutation(len(batches)):
            merger.take(batches[batch])
        _check_moments(merger.get_state(), notes)


def test_runners_continue_from_the_published_connector_state() -> None:
    notes: list[NDArray[np.float32]] = []
    merger = ConnectorMerger([FlattenObservations, MeanStd])
    with _runner(notes, 0) as one, _runner(notes, 1) as other:
        for seq in range(1, 6):
            for runner in (one, other):
                merger.take(_sampled(runner))
            for runner in (one, other):
                weights = runner.get_state()["rl_module"]
                runner.set_weights({**weights, **merger.get_state()}, seq)
        _check_moments(merger.get_state(), notes)
        for runner in (one, other):
            state = runner.get_state()["env_to_module"]
            for name in ("count", "mean", "m2"):
                np.testing.assert_array_equal(state[f"1.MeanStd/obs/{name}"], merger.get_state()[STATE + name])


def test_a_runner_takes_merged_state_without_a_connector_that_never_learns() -> None:
    merger = ConnectorMerger([FlattenObservations, MeanStd, Offset])
    with _runner([], 0, Offset) as runner:
        merger.take(_sampled(runner))
        runner.set_weights({**runner.get_state()["rl_module"], **merger.get_state()}, 1)
        state = runner.get_state()["env_to_module"]
    assert state["2.Offset/offset"].tolist() == [0.0]
    np.testing.assert_array_equal(state["1.MeanStd/obs/mean"], merger.get_state()[STATE + "mean"])


def test_a_restart_from_any_batch_ends_in_the_same_state() -> None:
    notes: list[NDArray[np.float32]] = []
    with _runner(notes, 0) as runner:
        batches = [_sampled(runner) for _ in range(5)]
    for died_after in range(len(batches)):
        first, second = (ConnectorMerger([FlattenObservations, MeanStd]) for _ in range(2))
        for batch in batches[:died_after]:
            first.take(batch)
        second.set_state(first.get_state())
        for batch in batches[died_after:]:
            second.take(batch)
        _check_moments(second.get_state(), notes)


def test_before_any_update_there_is_no_state(make_batch: MakeBatch) -> None:
    merger = ConnectorMerger([MEAN_STD])
    merger.take(make_batch([3], [ChunkEnd.ONGOING]))
    assert merger.get_state() == {}


def test_the_merged_state_shares_no_memory_with_the_batch(make_batch: MakeBatch) -> None:
    update = {"module_to_env/0.Counted/n": np.ones(2)}
    batch = replace(make_batch([3], [ChunkEnd.ONGOING]), connector_update=update)
    merger = ConnectorMerger(module_to_env=[Counted])
    merger.take(batch)
    update["module_to_env/0.Counted/n"][:] = 7.0
    assert merger.get_state()["connectors/module_to_env/0.Counted/n"].tolist() == [1.0, 1.0]
    merger.take(batch)
    assert merger.get_state()["connectors/module_to_env/0.Counted/n"].tolist() == [8.0, 8.0]


def test_updates_of_other_connectors_are_refused_and_nothing_is_taken(make_batch: MakeBatch) -> None:
    merger = ConnectorMerger([Counted])
    batch = make_batch([3], [ChunkEnd.ONGOING])
    both = {"env_to_module/0.Counted/n": np.ones(1), "env_to_module/1.MeanStd/obs/count": np.ones(1)}
    with pytest.raises(ConnectorError, match=r"env_to_module/1\.MeanStd failed: a batch of slot 0 has it") as told:
        merger.take(replace(batch, connector_update=both))
    assert "the learner's connectors are ['env_to_module/0.Counted']" in str(told.value)
    assert merger.get_state() == {}
    with pytest.raises(ConnectorError, match="nonsense/ failed: a state has it"):
        merger.set_state({"connectors/nonsense": np.ones(1)})


def test_a_connector_that_raises_in_merge_is_named_with_its_arrays(make_batch: MakeBatch) -> None:
    update = {"env_to_module/0.Broken/obs/mean": np.ones(2)}
    batch = replace(make_batch([3], [ChunkEnd.ONGOING]), connector_update=update)
    with pytest.raises(ConnectorError, match=r"0\.Broken failed: merge: RuntimeError: no .*obs/mean float64 \(2,\)"):
        ConnectorMerger([Broken]).take(batch)


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        ("nowhere", ConfigError, r"env_to_module\[0\]: 'nowhere' is not of the form"),
        ({"build": MEAN_STD, "colour": "red"}, ConfigError, "should be a table of build"),
        ("builtins:dict", ConfigError, "gave a dict, not a Connector"),
        (3, ConfigError, "3 is no connector, factory of one"),
        ({"build": MEAN_STD, "config": {"clip": -1.0}}, ConfigError, "clip"),
        (make_broken, ConnectorError, r"make_broken.*env_to_module\[0\] failed: RuntimeError: no luck"),
    ],
)
def test_settings_that_are_no_connectors_are_named(spec: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ConnectorMerger([spec])


def test_merging_needs_no_torch() -> None:
    program = "import sys; import headrace.learner_stub.rollouts.connector_merger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
