"""Callbacks of the multi-agent runner: their order, their views of the agents, and the cost of an exception."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd, to_episode
from headrace.schemas.errors import ConfigError
from headrace.workers import EnvContext
from headrace.workers.callbacks import RunnerCallback
from support.envs.toy_agents import Schedule, Together, check_books, multi_runner, scheduled
from support.runners.callbacks import Recording, count_events, raise_at
from support.runners.recurrent import REMEMBERING


def test_callbacks_see_one_episode_from_creation_to_end() -> None:
    course: list[Any] = []

    class Seeing(RunnerCallback):
        def on_environment_created(self, *, env: Any, env_context: EnvContext, rl_module: Any, **_: Any) -> None:
            course.append(("env", type(env), env_context.vector_index, rl_module))

        def on_episode_created(self, *, episode: Any, env: Any, env_index: int, **_: Any) -> None:
            course.append(("created", len(episode), episode.agent_ids, env.seeds[:], env_index))

        def on_episode_start(self, *, episode: Any, env: Any, **_: Any) -> None:
            assert env.seeds == [episode.seed]
            episode.agent("a0").custom_data["steps"] = 0
            seen = [view.observation.tolist() for view in episode.agents.values()]
            course.append(("start", len(episode), seen, episode.agents_to_act, episode.agent("a1").action))

        def on_episode_step(self, *, episode: Any, rl_module: Any, env_runner: Any, **_: Any) -> None:
            assert rl_module is env_runner.modules
            episode.agent("a0").custom_data["steps"] += 1
            assert all(int(view.action) in (0, 1, 2) for view in episode.agents.values())
            rewards = [(len(view), view.reward, view.end) for view in episode.agents.values()]
            course.append(("step", len(episode), rewards, episode.agents_done, episode.episode_return))

        def on_episode_end(self, *, episode: Any, **_: Any) -> None:
            a0, a1 = episode.agents.values()
            assert (a0.agent_id, a0.module_id, a0.env_index) == ("a0", "shared", 0)
            assert (a0.rewards.tolist(), a1.rewards.tolist()) == ([1.0], [2.0, 3.0])
            assert a0.observation.tolist() == [1, 0, 0]
            course.append(("end", len(episode), episode.end, a0.custom_data, a0.episode_return, a1.episode_return))

        def on_sample_end(self, *, samples: Any, **_: Any) -> None:
            course.append(("sample", len(samples)))

    ongoing, over = ChunkEnd.ONGOING, ChunkEnd.TERMINATED
    with multi_runner(callbacks=[Seeing], env_config={"lengths": [1, 2]}) as sampler:
        chunks = sampler.sample(num_episodes=1)
        assert course == [
            ("env", Together, 0, None),
            ("created", 0, [], [], 0),
            ("start", 0, [[0, 0, 0], [0, 0, 1]], ["a0", "a1"], None),
            ("step", 1, [(1, 1.0, over), (1, 2.0, ongoing)], ["a0"], 3.0),
            ("step", 2, [(1, 1.0, over), (2, 3.0, over)], ["a0", "a1"], 6.0),
            ("end", 2, over, {"steps": 2}, 1.0, 5.0),
            ("sample", len(chunks)),
        ]


def test_lengths_and_returns_include_steps_of_earlier_chunks() -> None:
    seen: list[Any] = []

    def look(episode: Any) -> None:
        seen.append((len(episode), episode.episode_return, [len(view) for view in episode.agents.values()]))

    with multi_runner(callbacks=[{"on_episode_step": look}], env_config={"lengths": [2, 4]}) as sampler:
        for _ in range(4):
            sampler.sample(num_timesteps=1)
    assert seen == [(1, 3.0, [1, 1]), (2, 8.0, [2, 2]), (3, 12.0, [2, 3]), (4, 17.0, [2, 4])]


def test_episode_views_are_correct_while_agents_come_and_go() -> None:
    """Compared across cuts: rewards with unanswered ones, answered steps, and the last observation and action."""
    truth: list[dict[str, Any]] = []
    ends: Counter[str] = Counter()

    def check(episode: Any, env: Schedule) -> None:
        mine = env.episode
        assert (episode.seed, len(episode)) == (mine["seed"], mine["t"])
        for agent, view in episode.agents.items():
            assert view.episode_return == mine["rewards"][agent]
            unanswered = agent not in env.waiting and not view.seat.done
            assert len(view) == len(mine["actions"][agent]) - unanswered
            if view.observation is not None:
                assert view.observation.tolist() == mine["seen"][agent][-1].tolist()
            if view.action is not None:
                assert int(view.action) == mine["actions"][agent][-1]
        assert set(episode.agents_done) == env.done & set(episode.agent_ids) or mine["over"]
        assert mine["over"] or set(episode.agents_to_act) == env.waiting

    def end(episode: Any) -> None:
        ends[episode.episode_id] += 1
        assert all(view.end is not ChunkEnd.ONGOING for view in episode.agents.values())

    callbacks = [{"on_episode_step": check, "on_episode_start": check, "on_episode_end": end}]
    settings = {"policies": ["even", "odd"], "policy_mapping_fn": lambda a, _: ("even", "odd")[int(a[1:]) % 2]}
    env = scheduled(truth, agents=4)
    with multi_runner(env, num_envs=3, rollout_fragment_length=4, callbacks=callbacks, **settings) as sampler:
        while sampler.totals.episodes < 60:
            sampler.sample_fragment()
        assert sum(ends.values()) == len(ends) == sampler.totals.episodes
        assert sampler.totals.discarded == {}


def test_the_error_names_an_agent_that_has_not_appeared() -> None:
    with multi_runner(env_config={"lengths": [9, 9]}) as sampler:
        sampler.sample(num_timesteps=1)
        (view,) = sampler.running_episodes()
        with pytest.raises(KeyError, match="agent 'a9' has not appeared"):
            view.agent("a9")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("event", ["on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end"])
@pytest.mark.parametrize("parts", [{"policies": ["shared"]}, {"policies": ["a0", "a1", "a2"]}, REMEMBERING])
def test_a_raising_callback_costs_one_episode_and_leaves_other_envs_unchanged(
    event: str, parts: dict[str, Any], caplog: Any
) -> None:
    truth: list[dict[str, Any]] = []

    def lives(callbacks: list[Any]) -> Any:
        seen = Recording()
        found = defaultdict(list)
        settings = {"num_envs": 3, "rollout_fragment_length": 10, **parts}
        with multi_runner(scheduled(truth), callbacks=[*callbacks, seen], **settings) as sampler:
            for _ in range(20):
                for c in sampler.sample_fragment():
                    found[c.env_index].append((c.episode_id, c.agent_id, c.chunk_index, c.end, c.obs.tobytes()))
                check_books(sampler)
            counts = count_events(seen.told)
            open_now = len(sampler.running_episodes())
            ended = counts["on_episode_end"] - (bool(callbacks) and event == "on_episode_end")
            assert counts["on_episode_created"] == ended + counts["on_episode_aborted"] + open_now
            assert ended == sampler.totals.episodes
            if callbacks:
                (told,) = [arguments for told, arguments in seen.told if told == "on_episode_aborted"]
                assert (told["reason"], told["env_index"]) == ("callback_exception", 1)
                assert set(sampler.totals.discarded) <= {"callback_exception"}
                assert sampler.totals.env_failures == counts["on_env_failed"] == 0
                assert "failed in " + event in caplog.text
        return found

    sound, troubled = lives([]), lives([raise_at(event, 3)])
    for index in (0, 2):
        assert sorted(sound[index]) == sorted(troubled[index])
    assert sorted(sound[1]) != sorted(troubled[1])


def test_each_open_agent_gets_a_marker_when_a_callback_ends_the_episode() -> None:
    settings = {"rollout_fragment_length": 3, "env_config": {"lengths": [9, 9, 2]}}
    with multi_runner(callbacks=[raise_at("on_episode_step", 5, 0)], **settings) as sampler:
        sampler.sample_fragment()
        markers = [c for c in sampler.sample_fragment() if not len(c)]
        assert [(m.agent_id, m.end_reason) for m in markers] == [(a, "callback_exception") for a in ("a0", "a1")]
        assert sampler.totals.discarded == {"callback_exception": 4}
        check_books(sampler)


def test_an_exception_in_on_episode_end_drops_the_last_step() -> None:
    settings = {"rollout_fragment_length": 3, "env_config": {"lengths": [4, 4]}}
    with multi_runner(callbacks=[raise_at("on_episode_end", 1, 0)], **settings) as sampler:
        sampler.sample_fragment()
        chunks = sampler.sample_fragment()
        assert {m.agent_id for m in chunks if m.end_reason == "callback_exception"} == {"a0", "a1"}
        assert sampler.totals.discarded == {"callback_exception": 2}
        assert sampler.get_metrics()["num_episodes"] == sampler.totals.episodes == 0
        check_books(sampler)


def test_an_env_failure_calls_on_env_failed_and_on_episode_aborted() -> None:
    looks: list[Any] = []

    class Seen(Recording):
        def on_env_failed(self, episode: Any, **arguments: Any) -> None:
            self.told.append(("on_env_failed", {"episode": episode, **arguments}))
            self.look(episode)

        def on_episode_aborted(self, episode: Any, **arguments: Any) -> None:
            self.told.append(("on_episode_aborted", {"episode": episode, **arguments}))
            self.look(episode)

        def look(self, episode: Any) -> None:
            agents = [(a, len(v), v.episode_return, v.observation.tolist()) for a, v in episode.agents.items()]
            looks.append((len(episode), episode.episode_return, agents))

    seen = Seen()
    truth: list[dict[str, Any]] = []
    with multi_runner(scheduled(truth, fails=0.05), num_envs=2, callbacks=[seen]) as sampler:
        while sampler.totals.env_failures < 5:
            sampler.sample(num_timesteps=20)
        failed = [arguments for event, arguments in seen.told if event == "on_env_failed"]
        aborted = [arguments for event, arguments in seen.told if event == "on_episode_aborted"]
        assert len(failed) == len(aborted) == sampler.totals.env_failures
        for one, other in zip(failed, aborted, strict=True):
            assert (str(one["exc"]), other["reason"]) == ("diverged", "env_exception")
            assert one["env_index"] == other["env_index"] == one["episode"].env_index
            assert one["episode"] is other["episode"]
        assert looks[::2] == looks[1::2]
        assert any(steps for _, _, agents in looks for _, steps, *_ in agents)
        recreated = [a["env_context"].recreated for event, a in seen.told if event == "on_environment_created"]
        assert recreated == [False, False] + [True] * sampler.totals.env_rebuilds


@pytest.mark.parametrize("when", ["reset", "step"])
def test_a_mapping_error_aborts_all_created_episodes(when: str) -> None:
    class Late(Together):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            observations, infos = super().reset(seed=seed)
            return ({"a0": observations["a0"]} if when == "step" and self.index == 1 else observations), infos

        def step(self, actions: dict[Any, Any]) -> Any:
            return super().step(dict.fromkeys(self.possible_agents, 0))

    seen = Recording()
    calls: list[str] = []

    def mapping(agent: str, episode_id: str) -> str:
        calls.append(agent)
        return "nobody" if len(calls) == 4 else "shared"

    with multi_runner(Late, num_envs=2, policy_mapping_fn=mapping, callbacks=[seen]) as sampler:
        with pytest.raises(ConfigError, match="was mapped to 'nobody'"):
            sampler.sample(num_timesteps=4)
        counts = count_events(seen.told)
        assert counts["on_episode_created"] == counts["on_episode_aborted"] == 2
        check_books(sampler)
        assert sampler.sample(num_timesteps=4)


def test_force_reset_and_make_env_call_on_episode_aborted() -> None:
    seen = Recording()
    with multi_runner(num_envs=2, callbacks=[seen], env_config={"lengths": [9, 9]}) as sampler:
        sampler.sample(num_timesteps=2)
        sampler.sample(num_timesteps=2, force_reset=True)
        sampler.make_env()
        counts = count_events(seen.told)
        assert counts["on_episode_aborted"] == 4
        assert counts["on_environment_created"] == 4
        assert counts["on_sample_end"] == 2
        weights = sampler.get_state()["rl_module"]
        sampler.set_weights(weights, seq=5)
        assert seen.told[-1][0] == "on_weights_applied"
        assert seen.told[-1][1]["version"] == (0, 5)


def test_running_episodes_gives_views_between_and_during_samplings() -> None:
    with multi_runner(num_envs=2, env_config={"lengths": [2, 9]}) as sampler:
        assert sampler.running_episodes() == []
        chunks = sampler.sample(num_timesteps=6)
        views = sampler.running_episodes()
        assert [(v.env_index, len(v), v.episode_return) for v in views] == [(0, 3, 12.0), (1, 3, 12.0)]
        assert {v.episode_id for v in views} == {c.episode_id for c in chunks}
        assert all(v.age_s > 0 for v in views)
        assert [{a: len(view) for a, view in v.agents.items()} for v in views] == [{"a0": 2, "a1": 3}] * 2
        seen: list[Any] = []
        sampler.sample_fragment(on_poll=lambda: seen.append([(len(v), v.agent("a1").reward) for v in views]))
    assert seen[:3] == [[(4, 5.0)] * 2, [(5, 6.0)] * 2, [(6, 7.0)] * 2]


def test_callbacks_get_the_unwrapped_pettingzoo_env() -> None:
    rps_v2 = pytest.importorskip("pettingzoo.classic.rps_v2")
    seen = Recording()
    with multi_runner(lambda _: rps_v2.env(), callbacks=[seen], module_config={"hidden": [8]}) as sampler:
        sampler.sample(num_timesteps=2, random_actions=True)
    assert {type(arguments["env"]) for _, arguments in seen.told if "env" in arguments} == {rps_v2.raw_env}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("seed", range(5))
def test_each_created_episode_ends_or_is_aborted_under_random_exceptions(seed: int, mode: str) -> None:
    """Envs and callbacks fail at random, agents come and go, and samplings of all sizes follow one another."""
    random = np.random.default_rng(seed)
    raised: Counter[str] = Counter()

    def sometimes(event: str, probability: float) -> Any:
        def raising() -> None:
            if random.random() < probability:
                raised[event] += 1
                raise RuntimeError(event)

        return raising

    likely = {"on_episode_created": 0.03, "on_episode_start": 0.03, "on_episode_step": 0.01, "on_episode_end": 0.05}
    seen = Recording()
    settings = {
        "num_envs": 1 + seed,
        "callbacks": [seen, {event: sometimes(event, p) for event, p in likely.items()}],
        "batch_mode": mode,
        "rollout_fragment_length": int(random.integers(1, 12)),
        "env_restart_attempts": 10**6,
    }
    with multi_runner(scheduled([], fails=0.01), seed=seed, **settings) as sampler:
        lives = defaultdict(list)
        for size in random.integers(-12, 12, 40).tolist():
            how = {"num_episodes": -size // 3} if size < 0 else {"num_timesteps": size, "force_reset": size == 1}
            how["end_markers"] = True
            for c in sampler.sample(**how) if abs(size) < 8 else sampler.sample_fragment():
                lives[c.episode_id, c.agent_id].append(c)
            check_books(sampler)
            counts, totals = count_events(seen.told), sampler.totals
            running = sampler.running_episodes()
            assert totals.episodes == counts["on_episode_end"] - raised["on_episode_end"]
            assert counts["on_episode_created"] == totals.episodes + counts["on_episode_aborted"] + len(running)
            uncut = sum(view.episode.t - view.episode.t_cut for view in running)
            assert totals.env_steps == totals.env_steps_delivered + totals.env_steps_discarded + uncut
        assert set(totals.discarded) <= {"callback_exception", "env_exception", "reset"}
        for c in sampler.sample(num_episodes=1, end_markers=True):
            lives[c.episode_id, c.agent_id].append(c)
    assert sum(raised.values()) > 3
    for chunks in lives.values():
        assert to_episode(chunks).end is not ChunkEnd.ONGOING
