"""Runner callbacks: when each is called, in which order and with which arguments, and what an exception costs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import CallbackError, ConfigError, EnvRestartBudgetError
from headrace.workers import EnvContext
from headrace.workers.callbacks import EVENTS, RunnerCallback
from support.envs.counting import NestedCounting
from support.envs.toy import Counting, Faulty, Walk, check_books, diverge, runner, with_fault
from support.envs.toy_agents import Together
from support.runners.callbacks import Recording, always, count_events, raise_at
from support.runners.comparing import assert_same
from support.runners.kinds import KINDS, MULTI, SINGLE, Kind


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_callback_events_match_the_episodes_and_steps_sampled(num_envs: int) -> None:
    """`num_episodes` creates no episode beyond those it returns, and each of them starts and ends once."""
    seen = Recording()
    with runner(num_envs=num_envs, callbacks=[seen], env_config={"length": 5}) as sampler:
        sampler.sample(num_episodes=4)
        counts = count_events(seen.told)
        episodes = -(-4 // num_envs) * num_envs
        assert counts["on_environment_created"] == num_envs
        assert counts["on_episode_created"] == counts["on_episode_start"] == episodes
        assert counts["on_episode_step"] == episodes * 5
        assert counts["on_episode_end"] == episodes
        assert counts["on_sample_end"] == 1
        seen.told.clear()
        sampler.sample(num_timesteps=5 * num_envs + 1)
        sampler.sample(num_timesteps=num_envs)
        counts = count_events(seen.told)
        assert counts["on_episode_step"] == 7 * num_envs
        assert (counts["on_episode_start"], counts["on_episode_end"]) == (2 * num_envs, num_envs)
        assert counts["on_sample_end"] == 2


def test_callbacks_see_one_episode_from_creation_to_end() -> None:
    course: list[Any] = []

    class Seeing(RunnerCallback):
        def on_environment_created(self, *, env: Any, env_context: EnvContext, env_runner: Any, **_: Any) -> None:
            course.append(("env", type(env), env_context.vector_index, env_runner.module))

        def on_episode_created(self, *, episode: Any, env: Any, env_index: int, **_: Any) -> None:
            course.append(("created", len(episode), episode.observation, env.seeds[:], env_index))

        def on_episode_start(self, *, episode: Any, env: Any, **_: Any) -> None:
            episode.custom_data["steps"] = 0
            course.append(("start", len(episode), episode.observation.tolist(), env.seeds == [episode.seed]))

        def on_episode_step(self, *, episode: Any, rl_module: Any, env_runner: Any, **_: Any) -> None:
            assert rl_module is env_runner.module is not None
            episode.custom_data["steps"] += 1
            action = int(episode.action)
            assert action in (0, 1, 2)
            course.append(("step", len(episode), episode.observation.tolist(), episode.reward, episode.end))

        def on_episode_end(self, *, episode: Any, metrics_logger: Any, **_: Any) -> None:
            metrics_logger.log_value("steps_seen", episode.custom_data["steps"])
            course.append(("end", len(episode), episode.episode_return, episode.end, episode.episode_id))

        def on_sample_end(self, *, samples: Any, **_: Any) -> None:
            course.append(("sample", len(samples)))

    with runner(callbacks=[Seeing], env_config={"length": 2}, rollout_fragment_length=1) as sampler:
        (chunk,) = sampler.sample(num_episodes=1)
        assert sampler.get_metrics()["steps_seen"] == 2
        assert course == [
            ("env", Counting, 0, None),
            ("created", 0, None, [], 0),
            ("start", 0, [0, 0], True),
            ("step", 1, [1, 0], 1.0, ChunkEnd.ONGOING),
            ("step", 2, [2, 0], 2.0, ChunkEnd.TERMINATED),
            ("end", 2, 3.0, ChunkEnd.TERMINATED, chunk.episode_id),
            ("sample", 1),
        ]
        course.clear()
        sampler.sample(num_timesteps=1)
        sampler.sample(num_timesteps=1)
        # The length counts what was cut before; the return too.
        assert [row[:2] for row in course if row[0] == "step"] == [("step", 1), ("step", 2)]
        assert [row[2] for row in course if row[0] == "end"] == [3.0]


def _by_rllibs_names(view: Any) -> list[Any]:
    seen, done, infos = view.get_observations(), view.get_actions(), view.get_infos()
    assert len(seen) == len(infos) == len(done) + 1 == len(view.get_rewards()) + 1
    for newest, all_of_them in (
        (view.get_observations(-1), seen),
        (view.get_actions(-1), done),
        (view.get_infos(-1), infos),
    ):
        assert repr(newest) == repr(all_of_them[-1])
    assert repr(view.get_observations([0, -1])) == repr([seen[0], seen[-1]])
    assert repr(view.get_actions(slice(1, 3))) == repr(done[1:3])
    assert view.get_rewards(-1) == view.reward
    with pytest.raises(IndexError, match=r"index 999 of \d since the last cut"):
        view.get_actions(999)
    return [repr(part) for part in (seen, done, infos, view.get_rewards().tolist(), view.get_return())]


def _told_of(chunk: Any) -> list[Any]:
    seen = [_row(chunk.obs, t) for t in range(len(chunk) + 1)]
    done = [_row(chunk.actions, t) for t in range(len(chunk))]
    infos = chunk.infos or [{}] * (len(chunk) + 1)
    return [repr(part) for part in (seen, done, infos, chunk.rewards.tolist(), chunk.episode_return)]


def _row(tree: Any, t: int) -> Any:
    if isinstance(tree, dict):
        return {key: _row(sub, t) for key, sub in tree.items()}
    return tuple(_row(sub, t) for sub in tree) if isinstance(tree, tuple) else tree[t].copy()


@pytest.mark.parametrize(("kind", "env"), [(SINGLE, NestedCounting), (MULTI, Together)], ids=["single", "multi"])
def test_episode_views_have_the_methods_of_rllib_episodes(kind: Kind, env: Any) -> None:
    told: dict[tuple[str, str], list[Any]] = {}
    ends: list[Any] = []

    def step(episode: Any) -> None:
        ends.append((episode.env_steps(), episode.is_done, episode.is_terminated, episode.is_truncated))

    def end(episode: Any) -> None:
        assert (episode.id_, episode.get_return()) == (episode.episode_id, episode.episode_return)
        for view in episode.agents.values() if kind is MULTI else [episode]:
            told[episode.id_, getattr(view, "agent_id", "default_agent")] = _by_rllibs_names(view)

    settings: dict[str, Any] = {"callbacks": [{"on_episode_step": step, "on_episode_end": end}]}
    settings["env_config"] = {"length": 4} if kind is SINGLE else {"lengths": [4, 4]}
    with kind.make(env, num_envs=1, **settings) as sampler:
        assert sampler.num_envs == 1
        chunks = sampler.sample(num_episodes=2)
        assert told == {(c.episode_id, c.agent_id): _told_of(c) for c in chunks}
    assert ends == [*((t, False, False, False) for t in (1, 2, 3)), (4, True, True, False)] * 2


@pytest.mark.parametrize(
    ("kind", "name", "ours"),
    [
        (SINGLE, "get_extra_model_outputs", "take chunk.columns of the chunks in on_sample_end"),
        (SINGLE, "total_reward", "take episode.episode_return"),
        (SINGLE, "agent_steps", "has no attribute 'agent_steps'$"),
        (MULTI, "get_rewards", r"take episode.agents\[agent_id\].get_rewards\(\)"),
    ],
)
def test_an_rllib_name_that_a_view_lacks_raises_an_attribute_error(kind: Kind, name: str, ours: str) -> None:
    with kind.runner(1) as sampler:
        sampler.sample(num_timesteps=3)
        (view,) = sampler.running_episodes()
        with pytest.raises(AttributeError, match=ours):
            getattr(view, name)


def test_callback_objects_run_before_functions_each_in_list_order() -> None:
    order: list[str] = []

    class First:
        def on_episode_start(self, episode: Any) -> None:
            order.append("first object")

    class Second(RunnerCallback):
        def on_episode_start(self, *, metrics_logger: Any, **_: Any) -> None:
            order.append("second object")

    functions = {"on_episode_start": [lambda: order.append("f1"), lambda **_: order.append("f2")]}
    more = {"on_episode_start": lambda env_index: order.append(f"f3 of env {env_index}")}
    with runner(callbacks=[functions, First, more, Second()]) as sampler:
        sampler.sample(num_timesteps=1)
    assert order == ["first object", "second object", "f1", "f2", "f3 of env 0"]


def test_callbacks_are_found_by_their_path() -> None:
    with runner(
        callbacks=["support.envs.toy:CountingSteps", {"on_sample_end": "support.envs.toy:log_sample"}]
    ) as sampler:
        sampler.sample(num_timesteps=7)
        metrics = sampler.get_metrics()
    assert (metrics["steps_counted"], metrics["samples_seen"]) == (7, 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"on_episode_stop": print}, "there is no event 'on_episode_stop'; the nearest is 'on_episode_step'"),
        ({"on_episode_step": 3}, "should be a function or a list of them, got 3"),
        ({"on_episode_step": lambda reward: None}, "asks for 'reward'; on_episode_step gives, by keyword, env_runner"),
        (object(), "has no method of an event"),
        ("nowhere:Callback", "cannot be imported"),
    ],
)
def test_a_callback_that_cannot_work_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runner(callbacks=[spec])


def test_the_error_names_a_callback_class_that_raises_in_init() -> None:
    class Broken:
        def __init__(self) -> None:
            raise OSError("no disk")

        def on_sample_end(self) -> None: ...

    with pytest.raises(CallbackError, match=r"Broken failed in __init__ \(OSError: no disk\)"):
        runner(callbacks=[Broken])


@pytest.mark.parametrize("event", ["on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end"])
def test_a_raising_callback_costs_one_episode_and_leaves_other_envs_unchanged(event: str, caplog: Any) -> None:
    def lives(callbacks: list[Any]) -> dict[int, list[Any]]:
        seen = Recording()
        found: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        with runner(Walk, num_envs=3, rollout_fragment_length=50, callbacks=[*callbacks, seen]) as sampler:
            for _ in range(8):
                for chunk in sampler.sample_fragment():
                    found[chunk.env_index].append(chunk)
            check_books(sampler)
            counts = count_events(seen.told)
            open_now = sum(lane.episode is not None for lane in sampler._sampler.envs.lanes)
            ended = counts["on_episode_end"] - (bool(callbacks) and event == "on_episode_end")  # told before one raised
            assert counts["on_episode_created"] == ended + counts["on_episode_aborted"] + open_now
            assert counts["on_env_failed"] == 0
            if callbacks:
                (told,) = [arguments for told, arguments in seen.told if told == "on_episode_aborted"]
                assert (told["reason"], told["env_index"]) == ("callback_exception", 1)
                assert set(sampler.totals.discarded) <= {"callback_exception"}
                assert sampler.totals.env_failures == 0
                assert "oops" in caplog.text
                assert "failed in " + event in caplog.text
        return found

    sound, troubled = lives([]), lives([raise_at(event, 3)])
    for index in (0, 2):
        assert len(sound[index]) == len(troubled[index])
        for a, b in zip(sound[index], troubled[index], strict=True):
            assert_same(a, b)
    assert [c.seed for c in sound[1]] != [c.seed for c in troubled[1]]


def test_the_marker_of_an_episode_that_a_callback_ended_names_it() -> None:
    with runner(Walk, callbacks=[raise_at("on_episode_step", 8, 0)], rollout_fragment_length=5) as sampler:
        (first,) = sampler.sample_fragment()
        *_, marker = sampler.sample_fragment()
        assert (marker.episode_id, marker.end_reason) == (first.episode_id, "callback_exception")
        assert sampler.totals.discarded == {"callback_exception": 3}
        assert sampler.totals.stepped == 10


@KINDS
@pytest.mark.parametrize("event", ["on_episode_created", "on_episode_start", "on_episode_step"])
def test_a_callback_that_always_raises_ends_sampling_with_a_typed_error(kind: Kind, event: str) -> None:
    with kind.make(callbacks=[{event: always}], env_restart_attempts=3) as sampler:
        with pytest.raises(EnvRestartBudgetError, match=rf"callback always failed in {event} \(KeyError") as caught:
            sampler.sample(num_timesteps=50)
        assert isinstance(caught.value.__cause__, CallbackError)
        kind.check_books(sampler)
    with kind.make(callbacks=[{event: always}], restart_failed_sub_environments=False) as sampler:
        with pytest.raises(CallbackError, match="repair it, or take it out of callbacks") as direct:
            sampler.sample(num_timesteps=50)
        assert isinstance(direct.value.__cause__, KeyError)
        kind.check_books(sampler)


def test_an_env_failure_calls_on_env_failed_and_on_episode_aborted() -> None:
    seen = Recording()
    config = with_fault(diverge, faulty={1}, every=7)
    with runner(Faulty, num_envs=2, env_config=config, callbacks=[seen], rollout_fragment_length=5) as sampler:
        sampler.sample_fragment()
        sampler.sample_fragment()
    (failed,) = [arguments for event, arguments in seen.told if event == "on_env_failed"]
    (aborted,) = [arguments for event, arguments in seen.told if event == "on_episode_aborted"]
    assert str(failed["exc"]) == "diverged"
    assert failed["env_index"] == aborted["env_index"] == 1
    assert len(failed["episode"]) == len(aborted["episode"]) == 6
    assert aborted["reason"] == "env_exception"
    recreated = [a["env_context"].recreated for event, a in seen.told if event == "on_environment_created"]
    assert recreated == [False, False, True]


@KINDS
def test_an_env_that_fails_in_reset_ends_the_episode_that_was_created(kind: Kind) -> None:
    resets: list[int] = []

    class Stubborn(kind.env):  # type: ignore[misc, name-defined]
        def reset(self, **_: Any) -> Any:
            resets.append(1)
            if len(resets) == 1:
                raise OSError("not yet")
            return super().reset(**_)

    seen = Recording()
    with kind.make(Stubborn, callbacks=[seen]) as sampler:
        sampler.sample(num_timesteps=1)
    events = [event for event, _ in seen.told if event != "on_sample_end"]
    created = ["on_environment_created", "on_episode_created"]
    assert events == [*created, "on_episode_aborted", "on_env_failed", *created, "on_episode_start", "on_episode_step"]


def test_an_exception_in_on_episode_aborted_is_logged_and_others_still_run(caplog: pytest.LogCaptureFixture) -> None:
    seen = Recording()
    with (
        runner(callbacks=[{"on_episode_aborted": [always, lambda **a: seen.told.append(("f", a))]}]) as sampler,
        caplog.at_level(logging.ERROR),
    ):
        sampler.sample(num_timesteps=3)
        *_, marker = sampler.sample(num_timesteps=3, force_reset=True, end_markers=True)
    assert [a["reason"] for _, a in seen.told] == ["reset"]
    assert marker.end is ChunkEnd.ABORTED
    assert "callback always failed in on_episode_aborted" in caplog.text


def test_a_callback_error_outside_an_episode_loses_no_samples_or_weights() -> None:
    with pytest.raises(CallbackError, match="on_environment_created"):
        runner(callbacks=[{"on_environment_created": always}])
    with runner(callbacks=[{"on_sample_end": always}]) as sampler:
        with pytest.raises(CallbackError, match="on_sample_end") as caught:
            sampler.sample(num_timesteps=5)
        assert sum(len(chunk) for chunk in caught.value.samples) == sampler.totals.delivered == 5
    with runner(callbacks=[{"on_weights_applied": always}]) as sampler:
        weights = sampler.get_state()["rl_module"]
        with pytest.raises(CallbackError, match="on_weights_applied"):
            sampler.set_weights(weights, seq=3)
        assert sampler.weights_version == (0, 3)


def test_on_weights_applied_comes_when_the_weights_take_effect_at_the_cut() -> None:
    seen = Recording()
    with runner(callbacks=[seen]) as sampler:
        weights = sampler.get_state()["rl_module"]
        sampler.sample_fragment(on_poll=lambda: sampler.set_weights(weights, seq=1, learner_epoch=2))
    told = [event for event, _ in seen.told]
    assert told.index("on_weights_applied") < told.index("on_sample_end")
    assert [a["version"] for event, a in seen.told if event == "on_weights_applied"] == [(2, 1)]


def test_running_episodes_returns_a_view_of_each_open_episode() -> None:
    with runner(num_envs=2, env_config={"length": 9}) as sampler:
        assert sampler.running_episodes() == []
        chunks = sampler.sample(num_timesteps=6)
        views = sampler.running_episodes()
        assert [(v.env_index, len(v), v.episode_return) for v in views] == [(0, 3, 6.0), (1, 3, 6.0)]
        assert [v.episode_id for v in views] == [c.episode_id for c in chunks]
        assert all(v.age_s > 0 for v in views)
        seen: list[Any] = []
        sampler.sample_fragment(on_poll=lambda: seen.append([(len(v), v.reward) for v in sampler.running_episodes()]))
    assert seen[:3] == [[(4, 4.0)] * 2, [(5, 5.0)] * 2, [(6, 6.0)] * 2]


def test_views_keep_the_nesting_of_observations_actions_and_infos() -> None:
    from support.envs.counting import NestedCounting

    seen: list[Any] = []

    def look(episode: Any) -> None:
        seen.append((episode.observation["pair"], episode.action["b"].shape, episode.info))

    with runner(NestedCounting, callbacks=[{"on_episode_step": look}]) as sampler:
        sampler.sample(num_timesteps=3)
    assert [(int(pair[0]), int(pair[1]), shape, info) for pair, shape, info in seen] == [
        (t, 98 - t, (2,), {"t": 3} if t == 3 else {}) for t in (1, 2, 3)
    ]
    assert np.issubdtype(seen[0][0][0].dtype, np.integer)


def test_a_callback_without_methods_of_its_own_is_called_for_no_event(tmp_path: Path) -> None:
    with runner(callbacks=[RunnerCallback]) as sampler:
        assert not any(sampler.callbacks.wants(event) for event in EVENTS)
        sampler.sample(num_timesteps=5)
