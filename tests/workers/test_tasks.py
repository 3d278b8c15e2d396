"""Tasks at run time: each env gets its task with its next reset, and each chunk names the task that its env got."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.basics.bounds import MOST_TASK_NAME
from headrace.schemas.chunks.chunk import DEFAULT_AGENT, ChunkEnd, EpisodeChunk
from headrace.schemas.chunks.task import groups_of, spread, task_name
from headrace.schemas.errors import ConfigError, EncodeError
from headrace.schemas.messages import Tasks, WeightedTask
from headrace.schemas.messages.message_base import MOST_SHORT_DETAIL
from headrace.workers import EnvRunnerConfig
from headrace.workers.adapters.gym_vector_env import GymVectorEnv
from headrace.workers.callbacks import RunnerCallback
from support.envs.tasked import (
    NONE,
    Asking,
    AskingPair,
    Levels,
    Optioned,
    Pair,
    Taught,
    listed,
    masked,
    resetting,
    runner,
    wrapped,
)
from support.fleets.env_hosts import EnvHosts

HERE = "support.envs.tasked"
IN_PROCESSES: dict[str, Any] = {"env_placement": "process", "envs_per_process": 2}
SYNC, ASYNC = {"gym_env_vectorize_mode": "sync"}, {"gym_env_vectorize_mode": "async"}


def told(seq: int, *levels: Any, group: int = 0) -> Tasks:
    """A distribution over these levels, the later ones drawn more often."""
    tasks = [WeightedTask(values={"level": level}, weight=1.0 + i) for i, level in enumerate(levels)]
    return Tasks(version=(1, seq), tasks=tasks, group=group)


def check(chunks: Any, env: Any = Taught) -> list[Any]:
    """Compare each chunk's stamp with what its env saw. Return the levels, by chunk with steps.

    Without a task, an env with `set_task` keeps its last one.
    """
    levels = []
    for chunk in chunks:
        stamped = NONE if chunk.task is None else chunk.task.values["level"]
        if len(chunk):
            keeps = chunk.task is None and "Optioned" not in str(env)
            assert keeps or (chunk.obs[:, 0] == stamped).all(), (chunk, chunk.task)
            levels.append(stamped)
    return levels


def sample(sampler: Any, *plan: Tasks | int | None) -> list[EpisodeChunk]:
    """Sample as many fragments as a number says, and set tasks where the plan has some."""
    chunks: list[EpisodeChunk] = []
    for part in plan:
        if isinstance(part, int):
            for _ in range(part):
                chunks += sampler.sample_fragment()
        else:
            sampler.set_tasks(part)
    sampler.stop()
    return chunks


def brief(chunks: list[EpisodeChunk], env: int | None = None) -> list[Any]:
    """All that is to be equal in two runs; of one env or of all, in an order that does not depend on the pace."""
    rows = [
        (
            c.env_index,
            c.episode_id,
            c.agent_id,
            c.chunk_index,
            c.end,
            c.seed,
            c.obs.tobytes(),
            c.task and c.task.as_json(),
        )
        for c in chunks
        if env in (None, c.env_index)
    ]
    return sorted(rows, key=lambda row: row[:4])


PLAN = (2, told(1, 1.0, 2.0, 3.0), 6, told(2, 7.0, 8.0), 5, told(3), 4)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "set_task": (Taught, {}),
    "options": (Optioned, {}),
    "behind wrappers": (wrapped, {}),
    "a user's vector": (listed, {}),
    "sync": (Taught, SYNC),
    "sync, options": (Optioned, SYNC),
    "async": (f"{HERE}:Taught", ASYNC),
    "async, options": (f"{HERE}:Optioned", ASYNC),
    "a user's gymnasium vector": (masked, {}),
    "a vector in arrays": (Levels, {}),
    "agents": (Pair, {}),
    "processes": (f"{HERE}:Taught", IN_PROCESSES),
    "processes, options": (f"{HERE}:Optioned", IN_PROCESSES),
    "processes at their own pace": (f"{HERE}:Taught", {**IN_PROCESSES, "remote_env_batch_wait_ms": 0.0}),
    "processes that are replaced": (f"{HERE}:Taught", {**IN_PROCESSES, "env_process_max_episodes": 3}),
    "agents in processes": (f"{HERE}:Pair", IN_PROCESSES),
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_each_chunk_names_the_task_that_its_env_got(kind: str) -> None:
    env, settings = KINDS[kind]
    levels = check(chunks := sample(runner(env, **settings), *PLAN), env)
    assert {NONE, 1.0, 2.0, 3.0, 7.0, 8.0} == set(levels)
    assert {chunk.task.version for chunk in chunks if chunk.task} == {(1, 1), (1, 2)}
    begun = [chunk for chunk in chunks if chunk.chunk_index == 0 and chunk.env_index == 0 and len(chunk)]
    versions = [chunk.task and chunk.task.version[1] for chunk in sorted(begun, key=lambda chunk: chunk.episode_id)]
    assert versions == sorted(versions, key=[None, 1, 2].index) or versions[-1] is None, "with the next reset"


@pytest.mark.processes
def test_envs_on_a_host_get_their_tasks(tmp_path: Path) -> None:
    with EnvHosts(tmp_path) as hosts:
        hosts.start(f"{HERE}:Taught", 3)  # envs of a host that comes later act later
        sampler = runner(f"{HERE}:Taught", env_placement="remote", **hosts.at)
        chunks = sample(sampler, *PLAN)
    inline = sample(runner(f"{HERE}:Taught"), *PLAN)
    assert {1.0, 2.0, 3.0, 7.0, 8.0} < set(check(chunks))
    assert brief(chunks) == brief(inline)


@pytest.mark.processes
@pytest.mark.parametrize("pair", ["twice", "in processes", "agents in processes", "sync", "async"])
def test_two_runs_with_a_switch_are_equal_to_the_bit(pair: str) -> None:
    env = Pair if "agents" in pair else Taught
    other = {"twice": {}, "sync": SYNC, "async": ASYNC}.get(pair, IN_PROCESSES)
    first = sample(runner(f"{HERE}:{env.__name__}"), *PLAN)
    assert brief(first) == brief(sample(runner(f"{HERE}:{env.__name__}", **other), *PLAN))


def test_streams_without_tasks_are_as_before_and_draws_do_not_touch_them() -> None:
    without, single = sample(runner(), 6), sample(runner(), told(1, NONE, NONE, NONE), 6)
    assert [row[:7] for row in brief(without)] == [row[:7] for row in brief(single)]


@pytest.mark.processes
def test_an_env_process_that_is_killed_disturbs_no_sibling_and_no_stamp(tmp_path: Path) -> None:
    plan = (told(1, 1.0, 2.0, 3.0), 4, told(2, 7.0, 8.0), 4)
    settings: dict[str, Any] = {**IN_PROCESSES, "envs_per_process": 1, "env": f"{HERE}:Taught"}
    whole = sample(runner(**settings), *plan)
    hurt = sample(runner(**settings, env_config={"die": str(tmp_path / "died")}), *plan)
    assert (tmp_path / "died").exists()
    check(hurt)
    assert brief(hurt, 1) == brief(whole, 1)
    assert brief(hurt, 2) == brief(whole, 2)
    markers = [chunk for chunk in hurt if chunk.end is ChunkEnd.ABORTED]
    of = {chunk.episode_id: chunk.task for chunk in hurt if len(chunk)}
    assert all(marker.task == of[marker.episode_id] for marker in markers)


def test_draws_follow_the_weights_and_a_rule_gives_each_env_its_value() -> None:
    levels = check(sample(runner(num_envs=8, env_config={"length": 1}), told(1, 1.0, 2.0, 3.0), 80))
    shares = [levels.count(level) / len(levels) for level in (1.0, 2.0, 3.0)]
    np.testing.assert_allclose(shares, [1 / 6, 2 / 6, 3 / 6], atol=0.05)
    rule = spread(0.0, 5.0)
    chunks = [c for i in (0, 1) for c in sample(runner(worker_index=i, num_workers=2), told(1, rule), 3)]
    check(chunks)
    assert {(c.task.values["level"]) for c in chunks if c.task} == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}


@pytest.mark.processes
@pytest.mark.parametrize("settings", [{}, SYNC, ASYNC], ids=["inline", "sync", "async"])
def test_groups_share_seed_and_first_observation_over_two_workers(settings: dict[str, Any]) -> None:
    own = {"num_workers": 2, "env_config": {"length": 3}, **settings}
    parts = [
        sample(runner(f"{HERE}:Taught", worker_index=i, **own), told(1, 1.0, 2.0, 3.0, group=4), 12) for i in (0, 1)
    ]
    chunks = parts[0] + parts[1]
    check(chunks)
    complete, missing = groups_of(chunks, 4)
    assert len(complete) > 3
    for members in complete.values():
        assert len({m[0].seed for m in members}) == 1, "one seed"
        assert len({m[0].obs[0].tobytes() for m in members}) == 1
        assert [m[0].task.member for m in members if m[0].task] == [0, 1, 2, 3]
    assert {slot for members in complete.values() for m in members for slot in [m[0].slot]} == {0, 1}
    assert len({members[0][0].seed for members in complete.values()}) == len(complete)
    assert len({c.task.values["level"] for m in complete.values() for (c, *_) in m if c.task}) == 3
    assert all(0 < len(lacking) <= 4 for lacking in missing.values())


def test_workers_beyond_the_fleets_number_have_groups_of_their_own() -> None:
    beyond = sample(runner(worker_index=3, num_workers=2, env_config={"length": 3}), told(1, 1.0, group=3), 3)
    assert {chunk.task.group >> 40 for chunk in beyond if chunk.task and chunk.task.group is not None} == {1}


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")
@pytest.mark.parametrize(
    ("env", "settings"),
    [
        *((env, settings) for env in ("Optioned", "Pair") for settings in ({}, IN_PROCESSES)),
        *(("Optioned", settings) for settings in (SYNC, ASYNC)),
    ],
)
def test_a_task_that_envs_refuse_is_left_out_after_three_times(
    env: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sampler = runner(f"{HERE}:{env}", **settings, env_config={"refused": 2.0})
    levels = check(sample(sampler, told(1, 1.0, 2.0), 8, told(2, 2.0), 8), env)
    assert set(levels) == {1.0, NONE}
    assert sampler.tasks_refused.startswith("1 of 1 tasks left out, the newest after 3 failed resets: {'level': 2.0} (")
    assert "ValueError: too hard" in sampler.tasks_refused
    left_out = [
        r.getMessage() for r in caplog.records if r.levelno == logging.ERROR and "leaves it out" in r.getMessage()
    ]
    assert len(left_out) == 2
    assert all("{'level': 2.0}" in text for text in left_out)
    failures = [r.getMessage() for r in caplog.records if "failed at reset" in r.getMessage()]
    assert failures
    assert all('its task was {"level":2.0}' in text for text in failures)
    assert sampler.totals.newest_env_failure.endswith('; its task was {"level":2.0}')
    [group] = sampler.totals.failure_groups.all()
    assert group.tasks == ['{"level":2.0}'] * group.count


@pytest.mark.parametrize("env", [Taught, Pair], ids=["one agent", "two agents"])
def test_an_env_that_fails_at_a_step_names_its_task_however_long_the_error(env: Any) -> None:
    sampler = runner(env, num_envs=1, env_config={"breaks": 2.0}, env_restart_attempts=50)
    sampler.set_tasks(told(1, 2.0))
    while sampler.totals.env_failures < 2:
        sampler.sample_fragment()
    failure = sampler.totals.newest_env_failure
    assert failure.startswith("env_exception in env 0 at step 3: RuntimeError: broken xxx")
    assert failure.endswith('xxx; its task was {"level":2.0}')
    assert len(failure) == MOST_SHORT_DETAIL
    [group] = sampler.totals.failure_groups.all()
    assert group.tasks == ['{"level":2.0}'] * sampler.totals.env_failures
    sampler.stop()


@pytest.mark.parametrize("env", [Taught, Pair], ids=["one agent", "two agents"])
def test_episodes_count_for_the_task_as_published_so_a_spread_is_one(env: Any) -> None:
    given = {"name": "a", "level": spread(1.0, 3.0)}
    sampler = runner(env)
    chunks = sample(sampler, told(1, 7.0), 4, Tasks(version=(1, 2), tasks=[WeightedTask(values=given)]), 8)
    ended: dict[str, list[int]] = {}
    for chunk in chunks:
        if chunk.is_done and chunk.task is not None and chunk.agent_id in ("a", DEFAULT_AGENT):
            ended.setdefault('{"level":7.0}' if chunk.task.version == (1, 1) else SPREAD_NAME, []).append(
                chunk.episode_length
            )
    agents = 1 if env is Taught else 2
    assert len(ended) == 2
    assert sampler.totals.ended_by_task == {
        task: (len(lengths), float(agents * sum(lengths)), sum(lengths)) for task, lengths in ended.items()
    }
    assert len({chunk.task.values["level"] for chunk in chunks if chunk.task and chunk.task.version == (1, 2)}) == 3


SPREAD_NAME = '{"level":{"spread":[1.0,3.0,"fleet","linear"]},"name":"a"}'


def test_long_names_of_tasks_are_cut_and_differ() -> None:
    first, second = (task_name({"text": "x" * 4000 + end}) for end in "ab")
    assert (len(first), len(second)) == (MOST_TASK_NAME, MOST_TASK_NAME)
    assert first != second
    assert task_name({"b": 1, "a": 2}) == task_name({"a": 2, "b": 1}) == '{"a":2,"b":1}'


def test_a_task_that_is_left_out_leaves_its_share_to_the_others_in_proportion() -> None:
    sampler = runner(num_envs=8, env_config={"length": 1, "refused": 2.0}, env_restart_attempts=50)
    levels = check(sample(sampler, told(1, 1.0, 2.0, 3.0), 120))[-500:]
    assert len(levels) == 500
    assert levels.count(3.0) / 500 == pytest.approx(3 / 4, abs=0.07)


def test_refusals_count_only_in_a_row() -> None:
    class Often(Taught):
        refusals = iter([True, True, False] * 50)

        def _begin(self, level: float, seed: int | None) -> Any:
            if level == 2.0 and next(Often.refusals):
                raise ValueError("not today")
            return super()._begin(level, seed)

    levels = check(sample(runner(Often, num_envs=1, env_restart_attempts=50), told(1, 2.0), 10))
    assert set(levels) == {2.0}


def test_the_same_version_again_changes_nothing() -> None:
    once = sample(runner(), told(1, 1.0, 2.0, group=2), 3, 3)
    assert brief(once) == brief(sample(runner(), told(1, 1.0, 2.0, group=2), 3, told(1, 1.0, 2.0, group=2), 3))


def test_tasks_by_hand_are_what_publish_takes_and_each_call_has_a_version_of_its_own() -> None:
    by_hand, by_message = runner(), runner()
    plan: list[Any] = [{"level": 4.0}, [({"level": 1.0}, 1.0), ({"level": 2.0}, 2.0)], None]
    messages = [told(1, 4.0), told(2, 1.0, 2.0), told(3)]
    chunks: list[list[EpisodeChunk]] = [[], []]
    for own, message in zip(plan, messages, strict=True):
        by_hand.set_tasks(own)
        by_message.set_tasks(message)
        for kept, sampler in zip(chunks, (by_hand, by_message), strict=True):
            kept += sampler.sample(num_episodes=6)
    assert [row[:7] for row in brief(chunks[0])] == [row[:7] for row in brief(chunks[1])]
    assert {chunk.task.version for chunk in chunks[0] if chunk.task} == {(0, 1), (0, 2)}
    for wrong, group in ((3, 0), ([({"level": 1.0}, 0.0)], 0), ({"level": 1.0}, -1)):
        with pytest.raises(EncodeError, match="publish"):
            by_hand.set_tasks(wrong, group=group)
    by_hand.set_tasks({"level": 3.0}, group=2)
    assert {(c.task.version, c.task.member) for c in sample(by_hand, 4) if c.task} == {((0, 4), 0), ((0, 4), 1)}
    by_message.stop()


def test_a_view_has_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = runner()
    sampler.set_tasks(told(1, 6.0))
    sampler.sample_fragment()
    assert [view.task and view.task.values for view in sampler.running_episodes()] == [{"level": 6.0}] * 3
    sampler.stop()


def test_a_runner_that_continues_a_state_goes_on_with_the_draws() -> None:
    first, plan = runner(), told(1, 1.0, 2.0, 3.0)
    first.set_tasks(plan)
    first.sample(num_episodes=9)
    other = runner()
    other.set_state(first.get_state())
    other.set_tasks(plan)
    seen = [brief(list(sampler.sample(num_episodes=9))) for sampler in (first, other)]
    assert [row[6:] for row in seen[0]] == [row[6:] for row in seen[1]]
    first.stop()
    other.stop()


@pytest.mark.parametrize(
    ("env", "group", "words"),
    [
        (resetting, 0, "SyncVectorEnv resets its envs by itself; make it with AutoresetMode.DISABLED, or"),
        (Levels, 4, "Levels takes no seed for each env, so no groups"),
        (Asking, 4, "drivers of external episodes seed them, so tasks have no groups here"),
    ],
    ids=["resets by itself", "one seed", "external"],
)
def test_envs_that_cannot_take_tasks_say_so_and_have_none(env: Any, group: int, words: str) -> None:
    sampler = runner(env)
    if env is Levels:
        sampler.set_tasks(told(1, 1.0))
    with pytest.raises(ConfigError, match=words):
        sampler.set_tasks(told(2, 1.0, group=group))
    assert words in sampler.tasks_refused
    assert all(chunk.task is None for chunk in sample(sampler, 3))
    assert words in sampler.tasks_refused
    sampler.set_tasks(None)
    assert sampler.tasks_refused == ""


@pytest.mark.parametrize("env", [Asking, AskingPair])
def test_drivers_of_external_episodes_ask_for_their_task(env: Any) -> None:
    chunks = sample(runner(env), *PLAN)
    levels = set(check(chunks, Optioned))
    assert NONE in levels
    assert levels & {1.0, 2.0, 3.0}
    assert levels & {7.0, 8.0}


@pytest.mark.parametrize("env", [Taught, Optioned])
def test_options_of_a_gym_vector_are_the_task_of_all_envs(env: Any) -> None:
    envs = GymVectorEnv(EnvRunnerConfig(env=env, num_envs=2, seed=5))
    assert envs.reset(seed=3, options={"level": 4})[0][:, 0].tolist() == [4.0, 4.0]
    for _ in range(7):
        seen = envs.step(np.zeros(2, np.int64))[0]
    assert seen[:, 0].tolist() == [4.0, 4.0], "in the episodes that follow, too"
    assert envs.reset(options={"level": 6})[0][:, 0].tolist() == [6.0, 6.0]
    if env is Optioned:
        assert envs.reset()[0][:, 0].tolist() == [NONE, NONE]
    with pytest.raises(ValueError, match="no finite number"):
        envs.reset(options={"level": float("nan")})
    envs.close()


@pytest.mark.parametrize("settings", [{}, IN_PROCESSES], ids=["inline", "process"])
def test_options_that_all_envs_of_a_gym_vector_refuse_raise_an_error(settings: dict[str, Any]) -> None:
    config = EnvRunnerConfig(env=f"{HERE}:Optioned", num_envs=2, env_config={"refused": 7}, **settings)
    envs = GymVectorEnv(config)
    try:
        envs.reset(options={"level": 4})
        with pytest.raises(ConfigError, match=r"options: .*'level': 7.*ValueError: too hard"):
            envs.reset(options={"level": 7})
        with pytest.raises(gym.error.ResetNeeded):
            envs.step(np.zeros(2, np.int64))
        assert envs.reset(options={"level": 4})[0][:, 0].tolist() == [4.0, 4.0]
        assert envs.reset()[0][:, 0].tolist() == [NONE, NONE]
    finally:
        envs.close()


class Switching(RunnerCallback):
    """Sets other tasks when the 4th episode has ended: processes have reset its env by then, with the old task."""

    sampler: Any = None
    ended = 0

    def on_episode_end(self, **_: Any) -> None:
        Switching.ended += 1
        if Switching.ended == 4:
            Switching.sampler.set_tasks(told(2, 8.0))


@pytest.mark.processes
@pytest.mark.parametrize("settings", [{}, IN_PROCESSES], ids=["inline", "processes"])
def test_a_reset_ahead_with_an_older_task_is_done_again(settings: dict[str, Any]) -> None:
    Switching.ended = 0
    Switching.sampler = sampler = runner(f"{HERE}:Taught", callbacks=[Switching], **settings)
    chunks = sample(sampler, told(1, 3.0), 6)
    assert set(check(chunks)) == {3.0, 8.0}
    begun = sorted((c.env_index, c.episode_id, c.task.version[1]) for c in chunks if c.task and not c.chunk_index)
    assert [version for *_, version in begun].count(1) <= 6, "no episode begins with the old task after the switch"
