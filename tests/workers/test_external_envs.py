"""Envs that drive themselves: their episodes are sampled like any other, and nobody waits for who is gone."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from external_envs import Failing, Idle, Serving
from toy_envs import check_books, runner

from headrace.schemas.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.schemas.episode_errors import (
    CannotLogError,
    EpisodeAbortedError,
    EpisodeBusyError,
    EpisodeCompletedError,
    EpisodeError,
    EpisodesClosedError,
    EpisodeStartedError,
    EpisodeTimeoutError,
    ExternalSilenceError,
    NoActionYetError,
    NoFreePlaceError,
    UnknownEpisodeError,
)
from headrace.schemas.errors import ConfigError, EnvContractError, EnvError, EnvRestartBudgetError
from headrace.schemas.ledger import Discard
from headrace.schemas.spaces import Spaces
from headrace.workers import EnvRunnerConfig, RunnerCallback, SingleAgentEnvRunner
from headrace.workers.connectors import FlattenObservations, FrameStack, PreviousActionReward
from headrace.workers.envs.spaces import convert
from headrace.workers.external import Answer, ExternalEnv, ExternalEpisodes
from headrace.workers.external.episodes import REMEMBERED

WaitFor = Callable[..., None]


def table(sampler: SingleAgentEnvRunner) -> ExternalEpisodes:
    vector: Any = sampler._vector
    episodes: ExternalEpisodes = vector.envs.episodes
    return episodes


def see(t: float, number: int = 0) -> Any:
    return np.array([t, number], np.float32)


def idle(**settings: Any) -> SingleAgentEnvRunner:
    """A runner whose episodes the test drives; a fragment is cut soon."""
    return runner(Idle, **{"external_fragment_max_age_s": 0.05, "num_envs": 2, **settings})


def pieced(chunks: Iterable[EpisodeChunk]) -> dict[str, list[EpisodeChunk]]:
    parts: dict[str, list[EpisodeChunk]] = defaultdict(list)
    for chunk in chunks:
        parts[chunk.episode_id].append(chunk)
    for episode in parts.values():
        to_episode(episode)
    return parts


# -- the numbers of the reference ---------------------------------------------------------------------------------


def test_fragments_have_the_steps_they_were_asked_for_and_whole_episodes_all_of_theirs() -> None:
    """An env of 25 steps, fragments of 40: 40, 40, 40; whole episodes: 50, 50, 50."""
    with runner(Serving, num_envs=1, rollout_fragment_length=40) as sampler:
        chunks = []
        for _ in range(3):
            cut = sampler.sample()
            assert sum(map(len, cut)) == 40
            chunks += cut
        check_books(sampler)
    for parts in pieced(chunks).values():
        whole = to_episode(parts)
        assert whole.rewards.tolist() == [float(t + 1) for t in range(len(whole))]
        assert whole.obs[:, 0].tolist() == list(range(len(whole) + 1))
        assert len(set(whole.obs[:, 1])) == 1
    with runner(Serving, num_envs=2, rollout_fragment_length=40, batch_mode="complete_episodes") as sampler:
        for _ in range(3):
            cut = sampler.sample()
            assert [len(chunk) for chunk in cut] == [25, 25]
            assert all(chunk.is_terminated and chunk.t_start == 0 for chunk in cut)
        check_books(sampler)


def test_a_logged_action_stands_where_it_was_taken() -> None:
    """42 first and last, in each episode, and marked."""
    with runner(Serving, num_envs=1, env_config={"logged": 42}) as sampler:
        for chunk in sampler.sample(num_episodes=3):
            off_policy = chunk.columns["off_policy"]
            assert off_policy.dtype == np.bool_
            assert np.flatnonzero(off_policy).tolist() == [0, 24]
            assert chunk.actions[[0, 24]].tolist() == [42, 42]


def test_of_five_open_episodes_any_two_may_go_on_in_a_round() -> None:
    class Multi(Serving):
        def run(self) -> None:
            random = np.random.default_rng(5)
            steps = {self.start_episode(): 0 for _ in range(5)}
            while True:
                for episode in random.choice(list(steps), 2, replace=False).tolist():
                    t = steps[episode]
                    if t == self.length:
                        self.end_episode(episode, self.seen(t, 0))
                        del steps[episode]
                        steps[self.start_episode()] = 0
                        continue
                    self.get_action(episode, self.seen(t, 0))
                    self.log_returns(episode, float(t + 1))
                    steps[episode] = t + 1

    with runner(Multi, num_envs=5, rollout_fragment_length=20) as sampler:
        chunks = [chunk for _ in range(4) for chunk in sampler.sample()]
        check_books(sampler)
        assert sampler.totals.delivered == sum(map(len, chunks)) == 400
    found = pieced(chunks)
    assert sum(parts[-1].is_terminated for parts in found.values()) >= 10
    for parts in found.values():
        whole = to_episode(parts)
        assert whole.rewards.tolist() == whole.obs[1:, 0].tolist()


# -- calls and what they refuse ------------------------------------------------------------------------------------


def test_ids_that_are_unknown_over_in_use_or_busy_are_refused_by_name() -> None:
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        assert episodes.start("one") == "one"
        assert len(episodes.start()) == 32
        with pytest.raises(EpisodeStartedError, match="is already started"):
            episodes.start("one")
        with pytest.raises(NoFreePlaceError, match="num_envs = 2 episodes are open"):
            episodes.start("three")
        with pytest.raises(EpisodeError, match="256 are allowed"):
            episodes.start("x" * 257)
        with pytest.raises(UnknownEpisodeError, match="not found"):
            episodes.ask("three", see(0), answers.append)
        with pytest.raises(NoActionYetError, match="no action yet"):
            episodes.log_returns("one", 1.0)
        episodes.ask("one", see(0), answers.append)
        for call in (episodes.ask, episodes.end):
            with pytest.raises(EpisodeBusyError, match="earlier call"):
                call("one", see(0), answers.append)
        with pytest.raises(EpisodeBusyError):
            episodes.log_returns("one", 1.0)
        sampler.sample_fragment()
        assert answers[0].action in range(100)
        episodes.end("one", see(1), answers.append)
        (chunk,) = sampler.sample_fragment()
        assert chunk.end is ChunkEnd.TERMINATED
        for again in (episodes.start, lambda name: episodes.ask(name, see(0), answers.append)):
            with pytest.raises(EpisodeCompletedError, match="has already completed"):
                again("one")
        assert [answer.error for answer in answers] == [None, None]
        episodes.start("three")


@pytest.mark.parametrize(
    ("say", "sentence"),
    [
        (lambda e: e.ask("one", np.zeros(3, np.float32), print), r"observation should be .* got float32 \(3,\)"),
        (lambda e: e.ask("one", np.zeros(2), print), "observation should be .* got float64"),
        (lambda e: e.ask("one", see(-1), print), r"observation should be within \[0"),
        (lambda e: e.ask("one", see(np.nan), print), "observation should be free of NaN"),
        (lambda e: e.end("one", None, print), "observation should be"),
        (lambda e: e.log_action("one", see(0), 100, print), r"action should be within \[0"),
        (lambda e: e.log_action("one", see(0), 1.5, print), "action should be int64"),
        (lambda e: e.log_returns("one", float("nan")), "finite scalar, got nan"),
        (lambda e: e.log_returns("one", np.ones(2)), "finite scalar"),
        (lambda e: [e.log_returns("one", 1e308) for _ in range(2)], "sum of rewards"),
        (lambda e: e.log_returns("one", 0.0, ["no dict"]), "a dict"),
    ],
)
def test_bad_data_is_an_error_of_who_gave_it_and_changes_nothing(say: Callable[..., None], sentence: str) -> None:
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        episodes.start("one")
        episodes.ask("one", see(0), answers.append)
        sampler.sample_fragment()
        with pytest.raises(EnvContractError, match=sentence):
            say(episodes)
        episodes.end("one", see(1), answers.append)
        (chunk,) = sampler.sample_fragment()
        assert len(chunk) == 1
        assert chunk.rewards[0] in (0.0, 1e308)
        assert sampler.totals.env_failures == 0


def test_rewards_add_up_between_actions_and_are_none_if_nobody_tells_any() -> None:
    with idle() as sampler:
        episodes = table(sampler)
        episodes.start("one")
        earned: list[list[float]] = [[1.0, 2.5], [], [-1.0]]
        for t, rewards in enumerate(earned):
            episodes.ask("one", see(t), lambda _: None)
            sampler.sample_fragment()
            for reward in rewards:
                episodes.log_returns("one", reward)
        episodes.end("one", see(3), lambda _: None, truncated=True)
        (last,) = sampler.sample_fragment()
        assert last.end is ChunkEnd.TRUNCATED
        assert last.rewards.tolist() == [-1.0]
        assert (last.episode_return, last.episode_length) == (2.5, 3)


def test_an_info_belongs_to_one_observation_only() -> None:
    """The reference keeps the last one for ever."""
    with idle() as sampler:
        episodes, chunks = table(sampler), list[EpisodeChunk]()
        episodes.start("one")
        for t in range(5):
            if t == 2:
                episodes.log_returns("one", 0.0, {"first": 1})
                episodes.log_returns("one", 0.0, {"second": 2})
            episodes.ask("one", see(t), lambda _: None)
            chunks += sampler.sample_fragment()
        episodes.end("one", see(5), lambda _: None)
        chunks += sampler.sample_fragment()
        assert to_episode(chunks).infos == [{}, {}, {"second": 2}, {}, {}, {}]


def test_ids_that_are_over_are_forgotten_one_day_and_nothing_grows() -> None:
    """The reference remembers all of them."""
    like = Idle({})
    spaces = Spaces(observation=convert(like.observation_space, ""), action=convert(like.action_space, ""))
    episodes = ExternalEpisodes(spaces, 3)
    for number in range(REMEMBERED + 50):
        episodes.start(str(number))
        episodes.ask(str(number), see(0), lambda _: None)
        episodes.abort(str(number), "gone")
        for place, error in episodes.take()[1]:
            episodes.release(place, error.reason)
    assert episodes.counts() == {"open": 0, "waiting": 0, "free": 3, "remembered": REMEMBERED}
    with pytest.raises(EpisodeAbortedError, match="was aborted: gone"):
        episodes.start("60")
    episodes.start("0")


# -- nothing is lost, and nobody waits for ever ------------------------------------------------------------------------


def test_no_last_transition_is_lost_however_fast_episodes_follow_one_another() -> None:
    """The reference may take an episode away between its end and the sampler's next look."""
    with runner(Serving, num_envs=4, rollout_fragment_length=50, env_config={"length": 1, "threads": 4}) as sampler:
        chunks = [chunk for _ in range(5) for chunk in sampler.sample_fragment()]
        check_books(sampler)
        assert len(chunks) == sampler.totals.delivered >= 1000
    assert all(chunk.is_terminated and chunk.rewards.tolist() == [1.0] for chunk in chunks)
    numbers = sorted(int(chunk.obs[0, 1]) for chunk in chunks)
    by_thread = [[number for number in numbers if number % 4 == thread] for thread in range(4)]
    for thread, own in enumerate(by_thread):
        assert own == list(range(thread, thread + 4 * len(own), 4))


@pytest.mark.parametrize("how", ["raising", "returning"])
def test_a_run_that_ends_is_a_failure_and_is_begun_again_by_the_usual_rules(how: str) -> None:
    """The reference waits for ever for a thread that is dead."""
    settings = {"env_config": {"how": how, "after": 10}, "env_restart_attempts": 3, "num_envs": 2}
    with runner(Failing, rollout_fragment_length=4, **settings) as sampler:
        chunks = [chunk for _ in range(5) for chunk in sampler.sample_fragment()]
        check_books(sampler)
        assert sampler.totals.env_failures >= 2
        assert sampler.totals.env_rebuilds == sampler.totals.env_failures
        assert set(sampler.totals.discarded) == {"env_exception"}
    ends = [parts[-1] for parts in pieced(chunks).values()]
    assert len(ends) >= 3
    assert {end.end_reason for end in ends[:-1]} == {"env_exception"}
    settings["env_config"] = {"how": how, "after": 0}
    with runner(Failing, **settings) as sampler:
        with pytest.raises(EnvRestartBudgetError, match=r"4 (failures|times)"):
            sampler.sample()
        assert sampler.totals.env_failures == 4


def test_whichever_of_its_threads_ends_ends_run() -> None:
    class Uneven(Serving):
        def play_on(self, thread: int) -> None:
            if thread == 2:
                raise RuntimeError("the third simulator is gone")
            super().play_on(thread)

    settings = {"num_envs": 3, "env_config": {"threads": 3}, "restart_failed_sub_environments": False}
    with runner(Uneven, **settings) as sampler, pytest.raises(RuntimeError, match="the third simulator is gone"):
        sampler.sample(num_timesteps=1_000_000)


def test_what_run_said_last_is_heard_before_it_counts_as_failed() -> None:
    class Brief(Serving):
        def run(self) -> None:
            self.play(0)

    with runner(Brief, env_config={"length": 1}, num_envs=1, rollout_fragment_length=20) as sampler:
        chunks = sampler.sample()
        assert [(len(chunk), chunk.end) for chunk in chunks] == [(1, ChunkEnd.TERMINATED)] * 20
        assert not sampler.totals.discarded


def test_a_run_that_nobody_wrote_says_so() -> None:
    class Unwritten(ExternalEnv):
        def __init__(self) -> None:
            super().__init__(gym.spaces.Discrete(2), gym.spaces.Discrete(2))

    with (
        runner(Unwritten, restart_failed_sub_environments=False) as sampler,
        pytest.raises(NotImplementedError, match=r"Unwritten must override run\(\)"),
    ):
        sampler.sample()


def test_who_drove_an_episode_and_is_gone_costs_that_episode_only() -> None:
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        for t in range(3):
            for name in ("one", "two"):
                if t == 0:
                    episodes.start(name)
                episodes.ask(name, see(t), answers.append)
            chunks = sampler.sample_fragment()
        episodes.ask("one", see(3), answers.append)
        episodes.abort("one", "its heartbeat has stopped")
        with pytest.raises(EpisodeAbortedError, match="its heartbeat has stopped"):
            episodes.log_returns("one", 1.0)
        chunks = sampler.sample_fragment()
        assert [(chunk.end_reason, len(chunk)) for chunk in chunks] == [("client_lost", 0)]
        assert isinstance(answers[-1].error, EpisodeAbortedError)
        assert episodes.counts() == {"open": 1, "waiting": 0, "free": 1, "remembered": 1}
        episodes.end("two", see(3), answers.append)
        (chunk,) = sampler.sample_fragment()
        assert chunk.is_terminated
        assert sampler.totals.env_failures == 0
        check_books(sampler)


@pytest.mark.parametrize("vanishes", [True, False])
def test_an_episode_that_both_sides_give_up_leaves_one_place(vanishes: bool) -> None:
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        for t in range(2):
            if t == 0:
                episodes.start("one")
            episodes.ask("one", see(t), answers.append)
            sampler.sample_fragment()
        episodes.ask("one", see(2), answers.append)
        if vanishes:
            episodes.abort("one", "gone")
        sampler.discard_open(Discard.SHUTDOWN)
        assert isinstance(answers[-1].error, EpisodeAbortedError)
        assert episodes.counts() == {"open": 0, "waiting": 0, "free": 2, "remembered": 1}
        episodes.start("two")
        episodes.ask("two", see(7), answers.append)
        sampler.sample_fragment()
        episodes.end("two", see(8), answers.append)
        (chunk,) = sampler.sample_fragment()
        assert chunk.obs[:, 0].tolist() == [7.0, 8.0]
        assert len(answers) == 5
        check_books(sampler)


def test_deadlines_have_names_and_what_is_given_up_is_told() -> None:
    settings = {"external_start_timeout_s": 0.1, "external_action_timeout_s": 0.1, "external_log_timeout_s": 0.1}
    with idle(num_envs=1, **settings) as sampler:
        env: Any = sampler.env
        env.start_episode("one")
        with pytest.raises(NoFreePlaceError, match=r"external_start_timeout_s = 0.1: num_envs = 1"):
            env.start_episode("two")
        with pytest.raises(EpisodeTimeoutError, match=r"get_action\(\) of episode 'one' waited for the sampler"):
            env.get_action("one", see(0))
        with pytest.raises(EpisodeAbortedError, match="external_action_timeout_s"):
            env.get_action("one", see(0))
        sampler.sample_fragment()
        env.start_episode("two")
        with pytest.raises(EpisodeTimeoutError, match="external_log_timeout_s"):
            env.log_action("two", see(0), 1)
        sampler.sample_fragment()
        assert sampler.totals.stepped == 0


def test_start_waits_for_a_place() -> None:
    with idle(num_envs=1) as sampler:
        env: Any = sampler.env
        env.start_episode("one")
        begun: list[str] = []
        waiting = threading.Thread(target=lambda: begun.append(env.start_episode("two")))
        waiting.start()
        env.end_episode("one", see(0))
        sampler.sample_fragment()
        waiting.join(20)
        assert begun == ["two"]


def test_at_its_end_all_who_wait_are_told_and_the_thread_is_gone(wait_for: WaitFor) -> None:
    errors: list[EpisodeError] = []
    with idle(num_envs=1) as sampler:
        env: Any = sampler.env
        env.start_episode("one")

        def ask() -> None:
            try:
                env.get_action("one", see(0))
            except EpisodeError as error:
                errors.append(error)

        waiting = threading.Thread(target=ask)
        waiting.start()
        wait_for(lambda: env.episodes.counts()["waiting"] == 1)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "run-Idle"]
    waiting.join(20)
    assert not thread.is_alive()
    assert isinstance(errors[0], EpisodesClosedError)
    with pytest.raises(EpisodesClosedError, match="the env was closed"):
        env.start_episode()


def test_a_thread_that_does_not_end_is_abandoned_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class Stubborn(Idle):
        def run(self) -> None:
            release.wait()

    with runner(Stubborn, env_close_timeout_s=0.05):
        pass
    release.set()
    assert "run-Stubborn did not end within 0.05 s" in caplog.text


class Wild(Serving):
    """Threads that play, log, go silent, make mistakes and fail."""

    def play_on(self, thread: int) -> None:
        random = np.random.default_rng(thread)
        while True:
            try:
                self.play_wildly(random, thread)
            except (EpisodeAbortedError, NoFreePlaceError, EnvContractError):
                continue

    def play_wildly(self, random: np.random.Generator, number: int) -> None:
        episode = self.start_episode(training_enabled=random.random() < 0.8)
        for t in range(int(random.integers(1, 30))):
            if random.random() < 0.1:
                self.log_action(episode, self.seen(t, number), int(random.integers(100)))
            else:
                self.get_action(episode, self.seen(t, number))
            self.log_returns(episode, float(t + 1), {"t": t + 1})
            if (mishap := random.random()) < 0.01:
                self.episodes.abort(episode, "it vanished")
            elif mishap < 0.011:
                raise RuntimeError("the simulator is gone")
        self.end_episode(episode, self.seen(t + 1, number), truncated=random.random() < 0.5)


def test_in_a_storm_nothing_is_lost_without_a_name_and_nothing_grows() -> None:
    settings = {"env_restart_attempts": 10_000, "max_env_restarts_per_window": 10_000, "external_start_timeout_s": 0.2}
    random, chunks = np.random.default_rng(0), list[EpisodeChunk]()
    with runner(Wild, num_envs=6, env_config={"threads": 9}, rollout_fragment_length=20, **settings) as sampler:
        weights = sampler.get_state("rl_module")["rl_module"]
        for turn in range(40):
            if random.random() < 0.15:
                sampler.set_weights(weights, seq=1, learner_epoch=turn)
            whim = random.random()
            if whim < 0.2:
                chunks += sampler.sample(num_timesteps=40, force_reset=whim < 0.1)
            else:
                chunks += sampler.sample(num_episodes=4) if whim < 0.3 else sampler.sample_fragment()
            check_books(sampler)
            counts = table(sampler).counts()
            assert counts["waiting"] <= counts["open"] <= 6
        chunks += sampler.discard_open(Discard.SHUTDOWN)
        assert sampler.totals.open == 0
        assert sampler.totals.delivered == sum(map(len, chunks))
        named = {"client_lost", "training_disabled", "env_exception", "reset", "shutdown"}
        assert set(sampler.totals.discarded) <= named
    for parts in pieced(chunks).values():
        assert parts[-1].end is not ChunkEnd.ONGOING
        for chunk in parts:
            times = np.arange(chunk.t_start, chunk.t_start + len(chunk) + 1)
            if len(chunk):
                assert chunk.obs[:, 0].tolist() == times.tolist()
                assert chunk.rewards.tolist() == times[1:].tolist()
                assert [info["t"] for info in chunk.infos[1:]] == times[1:].tolist()


# -- time ----------------------------------------------------------------------------------------------------------


def test_what_comes_slowly_is_shipped_all_the_same() -> None:
    with idle(rollout_fragment_length=1000) as sampler:
        assert list(sampler.sample_fragment()) == []
        episodes = table(sampler)
        episodes.start("one")
        for t in range(2):
            episodes.ask("one", see(t), lambda _: None)
            chunks = sampler.sample_fragment()
        (chunk,) = chunks
        assert (len(chunk), chunk.end) == (1, ChunkEnd.ONGOING)


def test_sample_does_not_wait_for_ever_for_nobody() -> None:
    with pytest.raises(ConfigError, match=r"external_fragment_max_age_s = 5 .*external_silence_timeout_s = 1,"):
        EnvRunnerConfig(env=Idle, external_silence_timeout_s=1)
    with idle(external_silence_timeout_s=0.1) as sampler:
        table(sampler).start()
        with pytest.raises(ExternalSilenceError, match=r"external_silence_timeout_s = 0.1 s \(1 are open\)"):
            sampler.sample(num_timesteps=1)


def test_waiting_takes_next_to_no_time_of_a_core() -> None:
    with idle(external_fragment_max_age_s=1.0) as sampler:
        sampler.sample_fragment()
        cpu, wall = time.process_time(), time.perf_counter()
        sampler.sample_fragment()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        assert wall >= 1.0
        assert cpu < 0.02 * wall


def test_episodes_that_ask_within_the_wait_are_answered_by_one_forward_pass() -> None:
    with idle(remote_env_batch_wait_ms=10_000, num_envs=4) as sampler:
        episodes, passes = table(sampler), list[int]()
        answered: Any = sampler._vector
        act, order = answered.envs.send_actions_of, [str(n) for n in range(3)]
        answered.envs.send_actions_of = lambda lanes, columns: (passes.append(len(lanes)), act(lanes, columns))
        for name in order:
            episodes.start(name)
        asking = threading.Thread(
            target=lambda: [episodes.ask(name, see(0), lambda _: None) for name in order], daemon=True
        )
        asking.start()
        while not passes:
            sampler.sample_fragment()
        asking.join(20)
        assert passes == [3]


# -- what goes to the learner ------------------------------------------------------------------------------------------


def test_every_action_comes_from_the_newest_weights_and_every_step_says_which() -> None:
    with idle() as sampler:
        episodes, answers, chunks = table(sampler), list[Answer](), list[EpisodeChunk]()
        weights = sampler.get_state("rl_module")["rl_module"]
        episodes.start("one")
        for t in range(4):
            sampler.set_weights(weights, seq=t + 1, learner_epoch=0)
            episodes.ask("one", see(t), answers.append)
            chunks += sampler.sample_fragment()
        episodes.end("one", see(4), answers.append)
        chunks += sampler.sample_fragment()
        assert [answer.weights for answer in answers[:4]] == [(0, 1), (0, 2), (0, 3), (0, 4)]
        assert to_episode(chunks).weights_seq.tolist() == [1, 2, 3, 4]
        assert to_episode(chunks).actions.tolist() == [answer.action for answer in answers[:4]]


def test_no_step_bears_the_number_of_one_learner_and_the_epoch_of_another() -> None:
    """An action that another learner's weights chose is not answered when the new ones come: its episode is over."""
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        weights = sampler.get_state("rl_module")["rl_module"]
        sampler.set_weights(weights, seq=7, learner_epoch=1)
        episodes.start("one")
        for t in range(2):
            episodes.ask("one", see(t), answers.append)
            sampler.sample_fragment()
        sampler.set_weights(weights, seq=1, learner_epoch=2)
        episodes.ask("one", see(2), answers.append)
        (marker,) = sampler.sample_fragment()
        assert marker.end_reason == "reset"
        assert isinstance(answers[-1].error, EpisodeAbortedError)
        assert sampler.weights_version == (2, 1)
        episodes.start("two")
        episodes.ask("two", see(0), answers.append)
        sampler.sample_fragment()
        assert answers[-1].weights == (2, 1)


def test_episodes_that_are_not_to_be_trained_on_are_counted_and_kept_back() -> None:
    class Mixed(Serving):
        def play_on(self, thread: int) -> None:
            for number in range(1000):
                self.play(number, training_enabled=number % 2 == 0)

    with runner(Mixed, num_envs=1, rollout_fragment_length=40) as sampler:
        chunks = [chunk for _ in range(5) for chunk in sampler.sample_fragment()]
        check_books(sampler)
        assert all(chunk.obs[0, 1] % 2 == 0 for chunk in chunks)
        assert sampler.totals.discarded == {"training_disabled": 100}
        assert sum(map(len, chunks)) == 100
        report = sampler.get_metrics()
        assert (report["num_episodes"], report["num_untrained_episodes_lifetime"]) == (4, 4)
        assert (report["untrained_episode_return_mean"], report["untrained_episode_len_mean"]) == (325.0, 25)
        assert len(sampler.sample(num_episodes=2)) >= 2


def test_the_log_prob_of_a_logged_action_is_the_policys_own() -> None:
    with runner(Serving, num_envs=1, env_config={"logged": 7}) as sampler:
        (chunk,) = sampler.sample(num_episodes=1)
        inputs = chunk.columns["action_dist_inputs"]
        shifted = inputs - inputs.max(axis=1, keepdims=True)
        logp = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        assert np.allclose(chunk.columns["logp"], logp[np.arange(25), chunk.actions], atol=1e-6)


class Steering(Idle):
    """Actions from -2 to 6, which the default policy squashes."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.action_space = gym.spaces.Box(-2.0, 6.0, (2,), np.float32)


class Silent(torch.nn.Module):
    """A policy that can give no log-prob but its own."""

    noise_size, noise_kind = 1, "uniform"

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = len(batch["obs"])
        return {"actions": torch.zeros(rows, dtype=torch.int64), "logp": torch.zeros(rows)}

    forward_inference = forward_train = forward_exploration


def log_one(sampler: SingleAgentEnvRunner, action: Any) -> EpisodeChunk:
    episodes, answers = table(sampler), list[Answer]()
    episodes.start("one")
    episodes.log_action("one", see(0), action, answers.append)
    sampler.sample_fragment()
    assert np.array_equal(answers[0].action, action)
    episodes.end("one", see(1), answers.append)
    (chunk,) = sampler.sample_fragment()
    return chunk


def test_a_logged_action_is_told_in_the_policys_terms_and_in_the_envs() -> None:
    with runner(Steering, external_fragment_max_age_s=0.05) as sampler:
        chunk = log_one(sampler, np.array([4.0, -2.0], np.float32))
        assert chunk.columns["actions_for_env"].tolist() == [[4.0, -2.0]]
        assert chunk.actions.tolist() == [[0.5, -1.0]]
        module: Any = sampler.module
        inputs = torch.from_numpy(chunk.columns["action_dist_inputs"])
        assert np.allclose(chunk.columns["logp"], module.logp(inputs, torch.tensor([[0.5, -1.0]])))


def test_a_module_that_cannot_tell_gives_a_logged_action_no_log_prob() -> None:
    with idle(module=lambda spaces: Silent()) as sampler:
        chunk = log_one(sampler, 3)
        assert chunk.actions.tolist() == [3]
        assert np.isnan(chunk.columns["logp"]).all()


def test_connectors_memory_and_callbacks_see_what_was_done() -> None:
    told: list[str] = []

    class Account(RunnerCallback):
        def on_episode_created(self, episode: Any, **_: Any) -> None:
            told.append("created")

        def on_episode_start(self, episode: Any, **_: Any) -> None:
            told.append("start")

        def on_episode_end(self, episode: Any, **_: Any) -> None:
            assert len(episode) == 5
            told.append("end")

    settings = {
        "env_to_module": [PreviousActionReward, FlattenObservations, lambda: FrameStack(2)],
        "module": "headrace.workers.modules:lstm_actor_critic",
        "callbacks": [Account],
        "env_config": {"logged": 42, "length": 5},
    }
    with runner(Serving, num_envs=1, rollout_fragment_length=7, **settings) as sampler:
        chunks = [chunk for _ in range(5) for chunk in sampler.sample_fragment()]
    assert told[:6] == ["created", "start", "end", "created", "start", "end"]
    for chunk in chunks:
        assert chunk.state_in
    pieced(chunks)


def test_a_callback_that_raises_costs_its_episode_and_who_drives_it_is_told() -> None:
    def spoil(episode: Any) -> None:
        if len(episode) == 2:
            raise ValueError("not this one")

    with idle(callbacks=[{"on_episode_step": spoil}]) as sampler:
        episodes = table(sampler)
        episodes.start("one")
        for t in range(3):
            episodes.ask("one", see(t), lambda _: None)
            sampler.sample_fragment()
        with pytest.raises(EpisodeAbortedError):
            episodes.log_returns("one", 1.0)
        assert sampler.totals.discarded == {"callback_exception": 1}
        check_books(sampler)


def test_where_connectors_map_actions_none_can_be_logged() -> None:
    with idle(module_to_env=["headrace.workers.connectors:ClipActions"]) as sampler:
        table(sampler).start("one")
        with pytest.raises(CannotLogError, match="module_to_env"):
            table(sampler).log_action("one", see(0), 1, lambda _: None)


def test_what_is_left_behind_is_told_to_both_sides() -> None:
    with idle() as sampler:
        episodes = table(sampler)
        episodes.start("one")
        for t in range(2):
            episodes.ask("one", see(t), lambda _: None)
            sampler.sample_fragment()
        (marker,) = sampler.discard_open(Discard.SHUTDOWN)
        assert (marker.end, marker.end_reason) == (ChunkEnd.ABORTED, "shutdown")
        with pytest.raises(EpisodeAbortedError, match="given it up"):
            episodes.ask("one", see(2), lambda _: None)
        episodes.start("two")
        episodes.ask("two", see(0), lambda _: None)
        sampler.make_env()
        with pytest.raises(EpisodesClosedError):
            episodes.start("three")
        table(sampler).start("three")
        check_books(sampler)


def test_a_constructor_that_leaves_out_its_base_is_told_so() -> None:
    class Careless(ExternalEnv):
        def __init__(self) -> None:
            pass

    with pytest.raises(ConfigError, match=r"super\(\).__init__\(action_space, observation_space\)"):
        runner(Careless)
    with pytest.raises(EnvError, match="in no runner yet"):
        Serving({}).start_episode()
