"""State: components by name, a round trip through arrays, and a restored runner that continues as the first would."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace.schemas.errors import ModuleError, StateError
from headrace.workers.connectors import FlattenObservations, FrameStack, MeanStd, PreviousActionReward
from headrace.workers.runner.policy_names import Selection
from support.envs.counting import NestedCounting
from support.envs.toy import Counting, Walk, runner
from support.envs.toy_agents import Together, multi_runner
from support.runners.comparing import assert_same, contents, equal_states, through_arrays
from support.runners.kinds import KINDS, MULTI, SINGLE, Kind, episodes_of

COUNTERS = {
    "num_env_steps_sampled_lifetime",
    "num_episodes_lifetime",
    "num_agent_steps_sampled_lifetime",
    "num_module_steps_sampled_lifetime",
    "num_actions_by_agent_lifetime",
    "num_env_step_failures_lifetime",
    "num_env_rebuilds_lifetime",
    "num_env_steps_discarded_lifetime",
}
VERSION = {"rl_module", "weights_seq_no", "learner_epoch", "weights_digest"}


def test_get_state_selects_components_by_name() -> None:
    with runner(env_config={"length": 3}) as sampler:
        sampler.sample(num_timesteps=7)
        whole = set(sampler.get_state())
        assert whole >= COUNTERS | VERSION | {"random_streams"}
        assert set(sampler.get_state(components="rl_module")) == COUNTERS | VERSION
        assert set(sampler.get_state(components=["random_streams"])) == COUNTERS | {"random_streams"}
        assert set(sampler.get_state(components=[])) == COUNTERS
        assert set(sampler.get_state(not_components="random_streams")) == whole - {"random_streams"}
        assert set(sampler.get_state(["rl_module", "random_streams"], "rl_module")) == COUNTERS | {"random_streams"}
        state = sampler.get_state([])
        assert (
            state["num_env_steps_sampled_lifetime"] == state["num_agent_steps_sampled_lifetime"]["default_agent"] == 7
        )
        assert state["num_episodes_lifetime"] == 2
        names = list(sampler.get_state()["rl_module"])
        assert list(sampler.get_state("rl_module/default_policy")["rl_module"]) == names
        assert set(sampler.get_state(not_components="rl_module/default_policy")) == whole - VERSION
        with pytest.raises(StateError, match="has no component 'rl_modul'; the nearest is 'rl_module'"):
            sampler.get_state("rl_modul")
        with pytest.raises(StateError, match="rl_module has no part 'p9'; its parts are"):
            sampler.get_state("rl_module/p9")


def test_a_selection_picks_parts_of_a_component() -> None:
    modules = {"p0": {"w": 1}, "p1": {"w": 2}}
    assert Selection("rl_module/p0", None).part("rl_module", modules) == {"p0": {"w": 1}}
    assert Selection(None, ["rl_module/p0"]).part("rl_module", modules) == {"p1": {"w": 2}}
    assert Selection(["rl_module", "rl_module/p1"], "rl_module/p0").part("rl_module", modules) == {"p1": {"w": 2}}
    assert not Selection("rl_module/p0", None).wants("env_to_module")


def test_a_state_goes_through_a_file_and_back() -> None:
    with runner(num_envs=2) as sampler, runner(num_envs=2) as other:
        sampler.sample(num_timesteps=9)
        state = sampler.get_state()
        received = through_arrays(state)
        assert equal_states(received, state)
        other.set_state(received)
        assert equal_states(other.get_state(), state)


def _compare(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("episodes", [1, 3])
def test_a_restored_runner_samples_the_same_whole_episodes(episodes: int) -> None:
    settings: dict[str, Any] = {"num_envs": 3}
    with runner(Walk, **settings) as first, runner(Walk, **settings) as second:
        for _ in range(3):
            first.sample(num_episodes=episodes)
        second.set_state(through_arrays(first.get_state()))
        for _ in range(40):  # beyond a block of seeds and of numbers
            _compare(first.sample(num_episodes=episodes), second.sample(num_episodes=episodes))
        assert first.get_state([]) == second.get_state([])


@pytest.mark.parametrize(
    ("kind", "env"), [(SINGLE, Counting), (SINGLE, NestedCounting), (MULTI, Together)], ids=["flat", "nested", "agents"]
)
def test_a_restored_runner_goes_on_at_an_episodes_boundary(kind: Kind, env: Any) -> None:
    """All envs were reset and none was stepped: the restored runner resets with the same seeds, under the same ids."""
    settings: dict[str, Any] = {"num_envs": 2, "rollout_fragment_length": 10}
    settings["env_config"] = {"length": 5} if kind is SINGLE else {"lengths": [5, 5]}
    with kind.make(env, **settings) as first, kind.make(env, **settings) as second:
        first.sample_fragment()
        second.set_state(first.get_state())
        for _ in range(10):
            assert contents(first.sample_fragment()) == contents(second.sample_fragment())


@pytest.mark.parametrize("module", ["actor_critic", "lstm_actor_critic"])
def test_a_restored_runner_continues_with_its_connectors_and_memory(module: str) -> None:
    """Both runners take the state by force, as its weights are not newer: the means of all lanes become one mean.

    What a lane has seen and not told yet counts beside any state, so the first tells it before.
    """
    settings: dict[str, Any] = {
        "num_envs": 2,
        "env_to_module": [PreviousActionReward, FlattenObservations, MeanStd, partial(FrameStack, 2)],
        "module": f"headrace.workers.modules:{module}",
    }
    with runner(Walk, **settings) as first, runner(Walk, **settings) as second:
        first.sample(num_episodes=2)
        first.take_connector_update()
        state = through_arrays(first.get_state())
        for sampler in (first, second):
            sampler.set_state(state, force=True)
        for _ in range(5):
            _compare(first.sample(num_episodes=2), second.sample(num_episodes=2))
        assert equal_states(first.get_state(), second.get_state())


@pytest.mark.parametrize(("kind", "env"), [(SINGLE, Walk), (MULTI, Together)], ids=["single", "multi"])
def test_runners_restored_from_one_state_are_alike_and_seed_their_first_reset(kind: Kind, env: Any) -> None:
    settings: dict[str, Any] = {"num_envs": 2, "seed_every_episode": False}
    with (
        kind.make(env, **settings) as first,
        kind.make(env, **settings) as second,
        kind.make(env, **settings) as third,
    ):
        used = {chunk.seed for chunk in first.sample(num_timesteps=60)} - {None}
        for sampler in (second, third):
            sampler.sample(num_timesteps=6)
            sampler.set_state(through_arrays(first.get_state()))
        ours, theirs = (s.sample(num_timesteps=200) for s in (second, third))
        _compare(ours, theirs)
    seeds = {chunk.episode_id: chunk.seed for chunk in ours}
    assert len(used) == 2
    assert len(set(seeds.values()) - {None}) == 2, "one for each env"
    assert not used & set(seeds.values())
    assert None in seeds.values()


def test_a_restored_runner_continues_the_stream_of_random_actions() -> None:
    with runner(Walk) as first, runner(Walk) as second:
        first.sample(num_episodes=2, random_actions=True)
        second.set_state(first.get_state())
        ours, theirs = (s.sample(num_episodes=2, random_actions=True) for s in (first, second))
        assert [c.actions.tolist() for c in ours] == [c.actions.tolist() for c in theirs]


@KINDS
def test_set_state_aborts_the_open_episode_with_the_reason_reset(kind: Kind) -> None:
    with kind.runner(num_envs=1, length=9) as first, kind.runner(num_envs=1, length=9) as second:
        begun = first.sample(num_timesteps=4)
        own = second.sample(num_timesteps=2)
        second.set_state(first.get_state())
        chunks = second.sample(num_timesteps=3, end_markers=True)
        markers, chunks = [c for c in chunks if not len(c)], [c for c in chunks if len(c)]
        assert {(m.episode_id, m.agent_id, m.end_reason) for m in markers} == {
            (c.episode_id, c.agent_id, "reset") for c in own
        }
        assert len(markers) == len(chunks) == kind.agents
        assert not episodes_of(chunks) & episodes_of([*begun, *own])
        assert {c.t_start for c in chunks} == {0}
        assert {c.seed for c in chunks} == {first.sample(num_timesteps=9)[-1].seed}
        kind.check_books(second)


def test_episode_ids_stay_unique_when_a_runner_is_set_back_to_an_old_state() -> None:
    with runner(Walk) as sampler:
        state = sampler.get_state()
        ids, seeds = [], []
        for _ in range(3):
            sampler.set_state(state)
            (chunk,) = sampler.sample(num_episodes=1)
            ids.append(chunk.episode_id)
            seeds.append(chunk.seed)
    assert len(set(ids)) == 3
    assert len(set(seeds)) == 1


@pytest.mark.parametrize(("kind", "env"), [(SINGLE, Walk), (MULTI, Together)], ids=["single", "multi"])
def test_a_runner_ignores_the_random_streams_of_another_worker(kind: Kind, env: Any) -> None:
    with (
        kind.make(env) as first,
        kind.make(env, worker_index=1) as second,
        kind.make(env, worker_index=1) as untouched,
    ):
        first.sample(num_timesteps=10)
        second.set_state(first.get_state())
        assert contents(second.sample(num_episodes=2)) == contents(untouched.sample(num_episodes=2))
        assert second.get_state()["num_env_steps_sampled_lifetime"] > 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 3}, r"random_streams/lanes/ahead should be int64 \(3,\), got int64 \(2,\)"),
        ({"env": NestedCounting}, r"random_streams/policy/ahead should be float32 \(None, 2, 3\), got float32"),
    ],
)
def test_random_streams_that_do_not_fit_are_refused_and_change_no_state(settings: dict[str, Any], message: str) -> None:
    with runner(num_envs=2) as first, runner(**{"num_envs": 2, **settings}) as second:
        before = second.get_state()
        with pytest.raises(StateError, match=message):
            second.set_state(first.get_state(not_components="rl_module"))
        assert equal_states(second.get_state(), before)
        with pytest.raises(StateError, match="got None"):
            second.set_state({"random_streams": {"worker_index": 0}})
        with pytest.raises(StateError, match="should be a dict, got 3"):
            second.set_state({"random_streams": 3})


@pytest.mark.parametrize("make", [runner, partial(multi_runner, policies=["a0", "a1"])])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: None, "a state is a dict as get_state gives it, got None"),
        (lambda state: {**state, "rl_module": None}, "rl_module should be a dict of arrays by name, got None"),
        (lambda state: {"rl_module": {"x": {"y": "z"}}}, "rl_module/x/y should be a dict of arrays by name, got 'z'"),
        (lambda state: {"rl_module": {3: np.ones(1)}}, "rl_module should have names, got 3 among them"),
        (lambda state: {"env_to_module": [1]}, r"env_to_module should be a dict of arrays by name, got \[1\]"),
        (lambda state: {**state, "weights_seq_no": "x"}, "weights_seq_no should be a number from 0, got 'x'"),
        (lambda state: {**state, "learner_epoch": -1}, "learner_epoch should be a number from 0, got -1"),
        (lambda state: {"num_episodes_lifetime": math.inf}, "lifetime counters are numbers"),
    ],
)
def test_set_state_refuses_a_malformed_state_and_the_runner_goes_on(make: Any, change: Any, message: str) -> None:
    with make() as sampler:
        sampler.sample(num_timesteps=3)
        with pytest.raises(StateError, match=message):
            sampler.set_state(change(sampler.get_state()))
        assert sampler.weights_version == (0, 0)
        assert len(sampler.sample(num_timesteps=3)) > 0


def test_weights_and_components_of_a_wrong_form_are_refused() -> None:
    with runner() as single, multi_runner(policies=["a0", "a1"]) as several:
        for sampler in (single, several):
            with pytest.raises(ModuleError, match=r"weights should be a dict of arrays by name, got \[\]"):
                sampler.set_weights([], seq=1)  # type: ignore[arg-type]
            with pytest.raises(StateError, match="components are given by name, as 'rl_module', got 3"):
                sampler.get_state(["rl_module", 3])  # type: ignore[list-item]
        flat = single.get_state(components="rl_module")
        with pytest.raises(StateError, match=r"weights by module id, \['a0', 'a1'\], got"):
            several.set_state({**flat, "weights_seq_no": 1})
