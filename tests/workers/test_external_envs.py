"""External envs: their episodes are sampled like those of other envs, and the data of each call is checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import EnvContractError
from headrace.schemas.errors.episodes import (
    EpisodeAbortedError,
    EpisodeError,
    NoFreePlaceError,
)
from headrace.workers.envs.spaces import convert
from headrace.workers.external import Answer, ExternalEpisodes
from headrace.workers.external.episodes import REMEMBERED
from support.envs.external import Idle, Serving, idle, pieced, see, table
from support.envs.toy import check_books, runner
from support.refusals import refused


def test_fragments_have_the_configured_steps_and_episodes_are_whole() -> None:
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


def test_a_logged_action_is_stored_at_its_step_and_marked_off_policy() -> None:
    """Action 42 is logged first and last in each episode, and marked off-policy."""
    with runner(Serving, num_envs=1, env_config={"logged": 42}) as sampler:
        for chunk in sampler.sample(num_episodes=3):
            off_policy = chunk.columns["off_policy"]
            assert off_policy.dtype == np.bool_
            assert np.flatnonzero(off_policy).tolist() == [0, 24]
            assert chunk.actions[[0, 24]].tolist() == [42, 42]


def test_any_two_of_five_open_episodes_may_step_in_one_round() -> None:
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


def test_calls_for_unknown_ended_started_or_busy_episodes_are_refused() -> None:
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        assert episodes.start("one") == "one"
        assert len(episodes.start()) == 32
        with refused("already_started", match="is already started"):
            episodes.start("one")
        with pytest.raises(NoFreePlaceError, match="num_envs = 2 episodes are open"):
            episodes.start("three")
        with pytest.raises(EpisodeError, match="256 are allowed"):
            episodes.start("x" * 257)
        with refused("unknown_episode", match="not found"):
            episodes.ask("three", see(0), answers.append)
        with refused("no_action", match="no action yet"):
            episodes.log_returns("one", 1.0)
        episodes.ask("one", see(0), answers.append)
        for call in (episodes.ask, episodes.end):
            with refused("busy", match="earlier call"):
                call("one", see(0), answers.append)
        with refused("busy"):
            episodes.log_returns("one", 1.0)
        sampler.sample_fragment()
        assert answers[0].action in range(100)
        episodes.end("one", see(1), answers.append)
        (chunk,) = sampler.sample_fragment()
        assert chunk.end is ChunkEnd.TERMINATED
        for again in (episodes.start, lambda name: episodes.ask(name, see(0), answers.append)):
            with refused("already_completed", match="has already completed"):
                again("one")
        assert [answer.error for answer in answers] == [None, None]
        episodes.start("three")


@pytest.mark.parametrize(
    ("say", "sentence"),
    [
        (lambda e: e.ask("one", np.zeros(3, np.float32), print), r"observation should be .* got float32 \(3,\)"),
        (lambda e: e.ask("one", np.zeros(2), print), "observation should be .* got float64"),
        (lambda e: e.ask("one", see(-np.inf), print), r"observation should be within \[0"),
        (lambda e: e.ask("one", see(np.nan), print), "observation should be free of NaN"),
        (lambda e: e.end("one", None, print), "observation should be"),
        (lambda e: e.log_action("one", see(0), 100, print), r"action should be within \[0"),
        (lambda e: e.log_action("one", see(0), 1.5, print), "action should be int64"),
        (lambda e: e.log_returns("one", float("nan")), "finite scalar, got nan"),
        (lambda e: e.log_returns("one", np.ones(2)), "finite scalar"),
        (lambda e: e.log_returns("one", 1e308), "Reward should be within"),
        (lambda e: [e.log_returns("one", 3e38) for _ in range(2)], "sum of rewards"),
        (lambda e: e.log_returns("one", 0.0, ["no dict"]), "a dict"),
    ],
)
def test_bad_data_raises_in_the_caller_and_changes_nothing(say: Callable[..., None], sentence: str) -> None:
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
        assert chunk.rewards[0] in (0.0, 3e38)
        assert sampler.totals.env_failures == 0


def test_rewards_between_actions_are_summed_and_default_to_zero() -> None:
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
    """The reference implementation keeps the last info for ever."""
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


def test_the_table_forgets_old_episode_ids_and_stays_bounded() -> None:
    """The reference implementation remembers all ids."""
    like = Idle({})
    spaces = Spaces(observation=convert(like.observation_space, ""), action=convert(like.action_space, ""))
    episodes = ExternalEpisodes(spaces, 3, dict)
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
