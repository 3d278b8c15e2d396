"""Learned state of connectors: in a runner's state, beside weights, merged across runners, and in shipped batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import ConnectorError, ModuleError, StateError
from headrace.workers import PolicySpec
from headrace.workers.connectors import FrameStack, MeanStd
from headrace.workers.connectors.connector import Connector
from support.envs.toy import Walk, runner
from support.envs.toy_agents import BOX, CHOICE, multi_runner, scheduled
from support.runners.comparing import through_arrays

COUNT = "0.MeanStd/obs/count"
TWO: dict[str, Any] = {
    "policies": {"a0": None, "a1": None, "idle": PolicySpec(observation_space=BOX, action_space=CHOICE)},
    "env_to_module": [MeanStd, partial(FrameStack, 2)],
    "env_config": {"lengths": [4, 7]},
    "policy_mapping_fn": lambda agent, _: agent,
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return np.array_equal(one, other)


def moments(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}


# -- state -------------------------------------------------------------------------------------------------------------


def test_a_runners_state_has_each_modules_connectors_by_name() -> None:
    with multi_runner(num_envs=2, **TWO) as first, multi_runner(num_envs=3, **TWO) as second:
        first.sample(num_timesteps=14)  # seven steps of each env: a1's whole episode, and a0's
        first.take_connector_update()
        state = through_arrays(first.get_state(not_components="random_streams"))  # for another number of envs
        counts = {name: float(a.squeeze()) for name, a in state["env_to_module"].items() if name.endswith("count")}
        assert counts == {f"a0/{COUNT}": 12, f"a1/{COUNT}": 18, f"idle/{COUNT}": 0}  # the next episodes' first rows too
        assert state["module_to_env"] == {}
        part = through_arrays(first.get_state("env_to_module/a1"))
        assert set(part["env_to_module"]) == {f"a1/0.MeanStd/obs/{name}" for name in ("count", "mean", "m2")}
        second.set_state(part)
        assert same(second.get_state("env_to_module/a1")["env_to_module"], part["env_to_module"])
        assert not second.get_state()["env_to_module"][f"a0/{COUNT}"].any()
        second.set_state(state, force=True)
        assert same(second.get_state()["env_to_module"], state["env_to_module"])
        assert same(second.get_state()["rl_module"], state["rl_module"])
        with pytest.raises(StateError, match="env_to_module has no part 'a2'; its parts are a0, a1, idle"):
            first.get_state("env_to_module/a2")


def test_a_state_replaces_what_connectors_have_learnt_since_their_last_update() -> None:
    with multi_runner(num_envs=2, **TWO) as sampler:
        sampler.sample(num_timesteps=8)
        state = sampler.get_state(not_components="random_streams")
        for force in (True, False):
            sampler.set_state(state if force else {"env_to_module": state["env_to_module"]}, force=force)
            assert same(sampler.get_state()["env_to_module"], state["env_to_module"])
        a0 = moments(state["env_to_module"], "a0/")
        sampler.sample(num_timesteps=8)
        sampler.set_state({"env_to_module": {f"a0/{name}": array for name, array in a0.items()}})
        assert same(moments(sampler.get_state()["env_to_module"], "a0/"), a0)
        update = sampler.take_connector_update()
        assert not update["a0"]["env_to_module"]
        assert update["a1"]["env_to_module"][COUNT], "no state of a1 came"


def test_connector_state_of_an_unknown_module_or_another_shape_is_refused_whole() -> None:
    with multi_runner(**TWO) as sampler:
        sampler.sample(num_timesteps=3)
        before = sampler.get_state()
        good = {f"a0/{name}": array + 1 for name, array in moments(before["env_to_module"], "a0/").items()}
        with pytest.raises(ConnectorError, match=r"there is no such module; the modules are \['a0', 'a1', 'idle'\]"):
            sampler.set_state({"env_to_module": {**good, f"a9/{COUNT}": np.zeros(1)}})
        with pytest.raises(ConnectorError, match=r"its state lacks \['0.MeanStd/obs/m2', '0.MeanStd/obs/mean'\]"):
            sampler.set_state({"env_to_module": {**good, f"a1/{COUNT}": np.zeros(1)}})
        assert same(sampler.get_state(), before)


def test_weights_and_connector_state_are_one_version_of_each_module_all_or_nothing() -> None:
    with multi_runner(num_envs=2, **TWO) as sampler:
        sampler.sample(num_timesteps=8)
        before = sampler.get_state()
        weights = {m: {name: a + 1 for name, a in own.items()} for m, own in before["rl_module"].items()}
        states = {
            m: {
                f"connectors/env_to_module/{name}": a * 2
                for name, a in moments(before["env_to_module"], f"{m}/").items()
            }
            for m in weights
        }
        wrong = {**states["a1"], f"connectors/env_to_module/{COUNT}": np.zeros(7)}
        with pytest.raises(ConnectorError, match="should be float64"):
            sampler.set_weights({"a0": {**weights["a0"], **states["a0"]}, "a1": {**weights["a1"], **wrong}}, 5)
        with pytest.raises(ModuleError, match="missing"):
            sampler.set_weights({"a0": {**weights["a0"], **states["a0"]}, "a1": {"x": np.zeros(1), **states["a1"]}}, 5)
        assert same(sampler.get_state(), before)
        sampler.take_connector_update()
        sampler.set_weights({"a0": {**weights["a0"], **states["a0"]}, "a1": states["a1"]}, 6)  # a1 is frozen
        after = sampler.get_state()
        assert same(after["rl_module"]["a0"], weights["a0"])
        assert same(after["rl_module"]["a1"], before["rl_module"]["a1"])
        for m in ("a0", "a1"):
            assert same(moments(after["env_to_module"], f"{m}/"), moments(states[m], "connectors/env_to_module/"))


def test_state_of_connectors_survives_a_rebuild_of_the_envs() -> None:
    with multi_runner(**TWO) as sampler:
        sampler.sample(num_timesteps=9)
        before = sampler.get_state()["env_to_module"]
        sampler.make_env()
        after = sampler.get_state()["env_to_module"]
        assert {name: a.tolist() for name, a in after.items()} == {name: a.tolist() for name, a in before.items()}
        sampler.sample(num_timesteps=9)


# -- merging -----------------------------------------------------------------------------------------------------------


def test_updates_of_all_runners_merge_to_the_moments_of_all_rows_by_module() -> None:
    """The result does not depend on where samples are cut or on what was merged before."""
    settings = {"policies": ["a0", "rest"], "policy_mapping_fn": lambda a, _: a if a == "a0" else "rest"}
    rows: dict[str, list[Any]] = {"a0": [], "rest": []}

    class Keep(Connector):
        """In front of the statistics, which scale what they give on."""

        def process(self, given: Any) -> Any:
            rows["a0" if not given.agents.any() else "rest"] += given.columns["obs"].tolist()
            return given.columns

        def connect(self, spaces: Any, width: int) -> Any:
            return spaces

    merged: Any = {}
    env = scheduled([])
    with (
        multi_runner(env, 0, num_envs=2, env_to_module=[Keep, MeanStd], **settings) as one,
        multi_runner(env, 1, num_envs=3, env_to_module=[Keep, MeanStd], **settings) as two,
    ):
        for polls in (5, 1, 12):
            one.sample(num_timesteps=2 * polls)
            two.sample(num_timesteps=9)
            merged = one.merge_connector_updates(merged, [r.take_connector_update() for r in (one, two)])
            for r in (one, two):
                weights = r.get_state()["rl_module"]
                r.set_weights({m: {**own, **merged[m]} for m, own in weights.items()}, polls)
        idle = one.merge_connector_updates(merged, [one.take_connector_update()])
    assert same(idle, merged)
    for module_id, own in rows.items():
        told = moments(merged[module_id], "connectors/env_to_module/1.MeanStd/obs/")
        assert told["count"] == len(own)
        np.testing.assert_allclose(told["mean"], np.mean(own, 0), atol=1e-9)
        np.testing.assert_allclose(told["m2"], len(own) * np.var(own, 0), rtol=1e-9, atol=1e-9)


# -- what a worker ships -----------------------------------------------------------------------------------------------


def test_a_fragments_batch_holds_the_connector_update_since_the_last_batch() -> None:
    with runner(Walk, num_envs=2, env_to_module=[MeanStd], rollout_fragment_length=5) as sampler:
        told = []
        for _ in range(3):
            batch = sampler.sample_fragment()
            assert set(batch.connector_update) == {f"env_to_module/0.MeanStd/obs/{n}" for n in ("count", "mean", "m2")}
            told.append(batch.connector_update)
        assert float(told[0][f"env_to_module/{COUNT}"].squeeze()) >= 12  # two first rows and two a poll
        assert sampler.take_connector_update() == {"env_to_module": {}, "module_to_env": {}}
        everything = sampler.get_state()["env_to_module"]
        assert sum(float(update[f"env_to_module/{COUNT}"].squeeze()) for update in told) == everything[COUNT]
        samples: Any = sampler.sample(num_timesteps=10)
        assert isinstance(samples, ChunkBatch)
        assert samples.connector_update == {}
        assert sampler.take_connector_update()["env_to_module"]


def test_each_modules_batch_holds_its_own_update_and_marker_batches_none() -> None:
    with multi_runner(num_envs=2, rollout_fragment_length=4, **TWO) as sampler:
        first = sampler.sample_fragment()
        counts = {m: float(b.connector_update[f"env_to_module/{COUNT}"].squeeze()) for m, b in first.batches.items()}
        assert counts == {"a0": 10, "a1": 10}
        second = sampler.sample_fragment()  # three steps of a1 alone, and the first of the next episode
        assert [len(second.batches[m]) for m in ("a0", "a1")] == [2, 4]
        last = sampler.discard_open(Discard.SHUTDOWN)
        assert all(len(batch) == 2 and not batch.connector_update for batch in last.batches.values())


def test_a_batch_without_chunks_takes_no_connector_update() -> None:
    with multi_runner(num_envs=2, rollout_fragment_length=2, **TWO) as sampler:
        sampler.sample(num_timesteps=2)
        sampler.sample(num_episodes=1)
        empty = sampler.discard_open(Discard.SHUTDOWN)
        assert not len(empty)
        assert all(batch.connector_update == {} for batch in empty.batches.values())
        assert sampler.take_connector_update()["a0"]["env_to_module"][COUNT].any()


def test_connectors_that_learn_nothing_add_nothing_to_a_batch() -> None:
    with runner(Walk, env_to_module=[partial(MeanStd, update=False), partial(FrameStack, 2)]) as sampler:
        assert sampler.sample_fragment().connector_update == {}


def test_the_error_names_a_connector_that_raises_in_take_update() -> None:
    class Mute(MeanStd):
        def take_update(self) -> Any:
            raise KeyError("lost")

    with runner(Walk, env_to_module=[Mute]) as sampler, pytest.raises(ConnectorError, match=r"\(Mute\).*KeyError"):
        sampler.sample_fragment()
