"""External episodes whose client or worker stops: every lost step has a reason, and no call waits for ever."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.errors import EnvContractError, EnvRestartBudgetError
from headrace.schemas.errors.episodes import (
    EpisodeAbortedError,
    EpisodeError,
    EpisodesClosedError,
    EpisodeTimeoutError,
    NoFreePlaceError,
)
from headrace.workers.external import Answer, ExternalEnv, self_driven
from support.envs.external import Failing, Idle, Serving, idle, pieced, see, table
from support.envs.toy import check_books, runner
from support.runners.closing import close_within
from support.waiting import wait_until


def test_the_last_step_of_episodes_in_quick_succession_is_not_lost() -> None:
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


def test_a_runner_that_is_dropped_without_stop_ends_the_threads_of_its_env() -> None:
    others = set(threading.enumerate())  # those of an earlier test may end meanwhile
    sampler = runner(Serving, num_envs=4, rollout_fragment_length=50, env_config={"length": 1, "threads": 4})
    sampler.sample_fragment()
    assert set(threading.enumerate()) - others
    del sampler  # it is in a cycle
    with pytest.warns(ResourceWarning, match="the runner of a Serving was dropped without stop"):
        gc.collect()
    wait_until(lambda: not set(threading.enumerate()) - others, "the end of its threads")


@pytest.mark.parametrize("how", ["raising", "returning", "exiting"])
def test_a_run_that_ends_is_an_env_failure_and_is_restarted_within_budget(how: str) -> None:
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


def test_an_exception_in_one_thread_of_run_is_raised_by_sample() -> None:
    class Uneven(Serving):
        def play_on(self, thread: int) -> None:
            if thread == 2:
                raise RuntimeError("the third simulator is gone")
            super().play_on(thread)

    settings = {"num_envs": 3, "env_config": {"threads": 3}, "restart_failed_sub_environments": False}
    with runner(Uneven, **settings) as sampler, pytest.raises(RuntimeError, match="the third simulator is gone"):
        sampler.sample(num_timesteps=1_000_000)


def test_the_last_episode_of_a_run_is_sampled_before_the_run_counts_as_failed() -> None:
    class Brief(Serving):
        def run(self) -> None:
            self.play(0)

    with runner(Brief, env_config={"length": 1}, num_envs=1, rollout_fragment_length=20) as sampler:
        chunks = sampler.sample()
        assert [(len(chunk), chunk.end) for chunk in chunks] == [(1, ChunkEnd.TERMINATED)] * 20
        assert not sampler.totals.discarded


def test_sample_raises_if_an_external_env_has_no_run_method() -> None:
    class Unwritten(ExternalEnv):
        def __init__(self) -> None:
            super().__init__(gym.spaces.Discrete(2), gym.spaces.Discrete(2))

    with (
        runner(Unwritten, restart_failed_sub_environments=False) as sampler,
        pytest.raises(NotImplementedError, match=r"Unwritten must override run\(\)"),
    ):
        sampler.sample()


def test_a_lost_client_costs_only_its_own_episode() -> None:
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


class _Masked(Idle):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.observation_space = gym.spaces.Dict(action_mask=gym.spaces.MultiBinary(100))


def test_an_unsound_mask_costs_only_its_own_episode_and_its_driver_is_told_of_the_mask() -> None:
    """Earlier, it cost the env with all its episodes, and in the end the worker."""
    legal, none = ({"action_mask": np.full(100, flag, np.int8)} for flag in (1, 0))
    with runner(_Masked, external_fragment_max_age_s=0.05, num_envs=2, env_restart_attempts=2) as sampler:
        episodes, answers = table(sampler), list[Answer]()
        episodes.start("good")
        episodes.ask("good", legal, answers.append)
        for number in range(5):
            episodes.start(f"bad-{number}")
            episodes.ask(f"bad-{number}", legal, answers.append)
            sampler.sample_fragment()
            episodes.ask(f"bad-{number}", none, answers.append)
            sampler.sample_fragment()
            with pytest.raises(EpisodeAbortedError, match=r"\['action_mask'\] should be 1 for at least one action"):
                episodes.log_returns(f"bad-{number}", 1.0)
        episodes.end("good", legal, answers.append)
        assert any(chunk.is_terminated for chunk in sampler.sample_fragment())
        assert (table(sampler), sampler.totals.env_failures) == (episodes, 0)
        check_books(sampler)


@pytest.mark.parametrize("vanishes", [True, False])
def test_an_episode_that_both_sides_abort_frees_one_place(vanishes: bool) -> None:
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


def test_a_missed_deadline_is_told_and_aborts_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_driven, "EXTERNAL_PATIENCE_S", 0.1)
    with idle(num_envs=1) as sampler:
        env: Any = sampler.env
        env.start_episode("one")
        with pytest.raises(NoFreePlaceError, match=r"within 0.1 s: num_envs = 1"):
            env.start_episode("two")
        with pytest.raises(EpisodeTimeoutError, match=r"get_action\(\) of episode 'one' waited for the sampler"):
            env.get_action("one", see(0))
        with pytest.raises(EpisodeAbortedError, match=r"within 0.1 s"):
            env.get_action("one", see(0))
        sampler.sample_fragment()
        env.start_episode("two")
        with pytest.raises(EpisodeTimeoutError, match=r"log_action\(\) of episode .two. .* within 0.1 s"):
            env.log_action("two", see(0), 1)
        sampler.sample_fragment()
        assert sampler.totals.stepped == 0


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts, as it does where the tests are not spread over processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_call_aborts_its_episode() -> None:
    """Earlier, its answer went nowhere: the episode had an action that the caller of an ActingClient never did."""

    def interrupt() -> None:
        wait_until(lambda: env.episodes.counts()["waiting"], "the call")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with idle(num_envs=1) as sampler:
        env: Any = sampler.env
        env.start_episode("one")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                env.log_action("one", see(0), 1)
        with pytest.raises(EpisodeAbortedError, match=r"log_action\(\) was interrupted"):
            env.log_action("one", see(0), 1)
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
        waiting.join(100)
        assert begun == ["two"]


def test_stop_raises_in_waiting_calls_and_ends_the_thread_of_run() -> None:
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
        wait_until(lambda: env.episodes.counts()["waiting"] == 1)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "run-Idle"]
    waiting.join(100)
    assert not thread.is_alive()
    assert isinstance(errors[0], EpisodesClosedError)
    with pytest.raises(EpisodesClosedError, match="the env was closed"):
        env.start_episode()


def test_a_thread_that_does_not_end_is_abandoned_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close_within(monkeypatch, 0.05)
    release = threading.Event()

    class Stubborn(Idle):
        def run(self) -> None:
            release.wait()

    with runner(Stubborn):
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


def test_under_random_faults_lost_steps_have_reasons_and_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_driven, "EXTERNAL_PATIENCE_S", 0.2)
    settings = {"env_restart_attempts": 10_000}
    random, chunks = np.random.default_rng(0), list[EpisodeChunk]()
    with runner(Wild, num_envs=6, env_config={"threads": 9}, rollout_fragment_length=20, **settings) as sampler:
        weights = sampler.get_state("rl_module")["rl_module"]
        for turn in range(40):
            if random.random() < 0.15:
                sampler.set_weights(weights, seq=1, learner_epoch=turn)
            whim = random.random()
            if whim < 0.2:
                chunks += sampler.sample(num_timesteps=40, force_reset=whim < 0.1, end_markers=True)
            else:
                whole = {"num_episodes": 4, "end_markers": True}
                chunks += sampler.sample(**whole) if whim < 0.3 else sampler.sample_fragment()
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
