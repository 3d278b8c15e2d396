"""What whoever comes from RLlib's runners relies on, in exact numbers: {one agent, two} x {1, 3, 8 envs} x both sizes.

All episodes are `LENGTH` env steps long and all envs begin together, so that every count can be told beforehand.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import toy_envs
import toy_multi_envs
from test_callbacks import Recording, _counts

from headrace.schemas.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.errors import ConfigError

LENGTH = 50


@dataclass(frozen=True)
class Kind:
    """One kind of runner, over envs whose episodes all are of one length."""

    agents: int
    make: Callable[..., Any]
    check_books: Callable[[Any], None]

    def runner(self, num_envs: int, length: int = LENGTH, **settings: Any) -> Any:
        config = {"length": length, "lengths": {}} if self.agents == 1 else {"lengths": [length] * self.agents}
        return self.make(num_envs=num_envs, env_config=config, **settings)

    def env_steps(self, chunks: Any) -> int:
        steps = sum(map(len, chunks))
        assert steps % self.agents == 0
        return steps // self.agents


SINGLE = Kind(1, toy_envs.runner, toy_envs.check_books)
MULTI = Kind(2, toy_multi_envs.multi_runner, toy_multi_envs.check_books)

KINDS = pytest.mark.parametrize("kind", [SINGLE, MULTI], ids=["single", "multi"])
WIDTHS = pytest.mark.parametrize("num_envs", [1, 3, 8])
MODES = pytest.mark.parametrize("mode", ["num_timesteps", "num_episodes"])


def _up(count: int, num_envs: int) -> int:
    """The next multiple of `num_envs`: what all envs together do when each does as much as any."""
    return -(-count // num_envs) * num_envs


def _episodes(chunks: Any) -> set[str]:
    return {c.episode_id for c in chunks}


def _resets(sampler: Any) -> int:
    return sum(len(lane.env.seeds) for lane in sampler._vector.envs.lanes)


# -- which sizes there are --------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
@pytest.mark.parametrize(
    "sizes", [{"num_timesteps": 3, "num_episodes": 3}, {"num_timesteps": -1}, {"num_episodes": -1}]
)
def test_a_size_that_makes_no_sense_is_refused_and_moves_nothing(kind: Kind, num_envs: int, sizes: Any) -> None:
    with kind.runner(num_envs) as sampler:
        with pytest.raises(AssertionError, match="give") as caught:
            sampler.sample(**sizes)
        assert isinstance(caught.value, ConfigError)
        with pytest.raises(TypeError):
            sampler.sample(5)
        assert _resets(sampler) == sampler.totals.stepped == 0


@KINDS
@WIDTHS
@MODES
def test_none_asked_for_gives_none_and_moves_nothing(kind: Kind, num_envs: int, mode: str) -> None:
    seen = Recording()
    with kind.runner(num_envs, callbacks=[seen]) as sampler:
        sampler.sample(num_timesteps=2 * num_envs)
        told = len(seen.told)
        assert sampler.sample(**{mode: 0}) == []
        assert len(seen.told) == told
        chunks = sampler.sample(num_timesteps=num_envs)
        assert {c.t_start for c in chunks} == {2}


@KINDS
@WIDTHS
def test_without_a_size_the_batch_mode_decides(kind: Kind, num_envs: int) -> None:
    with kind.runner(num_envs, rollout_fragment_length=20) as sampler:
        for _ in range(3):
            assert kind.env_steps(sampler.sample()) == 20 * num_envs
    with kind.runner(num_envs, batch_mode="complete_episodes") as sampler:
        for _ in range(2):
            chunks = sampler.sample()
            assert len(_episodes(chunks)) == num_envs
            assert all(c.is_done and len(c) == LENGTH for c in chunks)


# -- num_timesteps ----------------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
def test_num_timesteps_gives_n_up_to_a_poll_more(kind: Kind, num_envs: int) -> None:
    with kind.runner(num_envs) as sampler:
        for n in (1, 2, 7, 8, 9, 24, 100):
            steps = kind.env_steps(sampler.sample(num_timesteps=n))
            assert steps == _up(n, num_envs)
            assert n <= steps <= n + num_envs - 1
            kind.check_books(sampler)
        assert sampler.totals.discarded == {}


@KINDS
@WIDTHS
def test_num_timesteps_goes_on_where_the_last_call_stopped(kind: Kind, num_envs: int) -> None:
    lives: dict[Any, list[EpisodeChunk]] = defaultdict(list)
    with kind.runner(num_envs) as sampler:
        for _ in range(11):
            chunks = sampler.sample(num_timesteps=20 * num_envs)
            done = [c.is_done for c in chunks]
            assert done == sorted(done, reverse=True)
            assert all(len(c) for c in chunks)
            for c in chunks:
                lives[c.env_index, c.agent_id].append(c)
    assert len(lives) == num_envs * kind.agents
    for life in lives.values():
        assert [len(c) for c in life] == [20, 20, 10, 10, 20, 20] * 2 + [20]
        assert [c.t_start for c in life] == [0, 20, 40, 0, 10, 30] * 2 + [0]
        assert [c.chunk_index for c in life] == [0, 1, 2, 0, 1, 2] * 2 + [0]
        assert [c.is_done for c in life] == [False, False, True] * 4 + [False]
        assert len(_episodes(life)) == 5
        for one, following in itertools.pairwise(life):
            if not one.is_done:
                assert one.episode_id == following.episode_id
                np.testing.assert_array_equal(one.obs[-1], following.obs[0])
            else:
                assert one.obs[-1][0] == one.episode_length == LENGTH


@KINDS
@WIDTHS
def test_an_episode_that_ends_with_the_call_leaves_no_empty_chunk(kind: Kind, num_envs: int) -> None:
    with kind.runner(num_envs) as sampler:
        for _ in range(3):
            chunks = sampler.sample(num_timesteps=LENGTH * num_envs)
            assert [(len(c), c.t_start, c.is_done) for c in chunks] == [(LENGTH, 0, True)] * num_envs * kind.agents


# -- num_episodes -----------------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
def test_num_episodes_gives_m_whole_ones_up_to_a_poll_more(kind: Kind, num_envs: int) -> None:
    ids: set[str] = set()
    with kind.runner(num_envs) as sampler:
        for m in (1, 2, 5, 8):
            chunks = sampler.sample(num_episodes=m)
            assert len(_episodes(chunks)) == _up(m, num_envs)
            assert m <= len(_episodes(chunks)) <= m + num_envs - 1
            assert {(len(c), c.t_start, c.chunk_index, c.end) for c in chunks} == {(LENGTH, 0, 0, ChunkEnd.TERMINATED)}
            assert not ids & _episodes(chunks)
            ids |= _episodes(chunks)
            kind.check_books(sampler)
        assert _resets(sampler) == len(ids)
        assert sampler.totals.discarded == {}


# -- what is reset, and what becomes of what was going on -------------------------------------------------------------


@KINDS
@WIDTHS
@MODES
def test_episodes_that_are_left_behind_are_told_as_aborted(kind: Kind, num_envs: int, mode: str) -> None:
    with kind.runner(num_envs) as sampler:
        begun = sampler.sample(num_timesteps=4 * num_envs)
        size = num_envs if mode == "num_episodes" else 3 * num_envs
        chunks = sampler.sample(**{mode: size}, force_reset=mode == "num_timesteps")
        anew, markers = [c for c in chunks if len(c)], [c for c in chunks if not len(c)]
        assert not any(map(len, chunks[len(anew) :]))
        assert {(m.episode_id, m.agent_id) for m in markers} == {(c.episode_id, c.agent_id) for c in begun}
        assert {(m.end, m.end_reason, m.chunk_index, m.t_start) for m in markers} == {(ChunkEnd.ABORTED, "reset", 1, 4)}
        assert {(c.t_start, c.chunk_index) for c in anew} == {(0, 0)}
        assert not _episodes(anew) & _episodes(begun)
        assert sampler.totals.discarded == {}
        kind.check_books(sampler)


@KINDS
@WIDTHS
def test_timesteps_after_episodes_begin_anew(kind: Kind, num_envs: int) -> None:
    with kind.runner(num_envs) as sampler:
        whole = sampler.sample(num_episodes=num_envs)
        for t_start in (0, 2, 4):
            chunks = sampler.sample(num_timesteps=2 * num_envs)
            assert {c.t_start for c in chunks} == {t_start}
            assert not _episodes(chunks) & _episodes(whole)
        assert _resets(sampler) == 2 * num_envs


@KINDS
@WIDTHS
@MODES
def test_envs_made_anew_begin_anew(kind: Kind, num_envs: int, mode: str) -> None:
    with kind.runner(num_envs) as sampler:
        size = num_envs if mode == "num_episodes" else 4 * num_envs
        before = sampler.sample(**{mode: size})
        sampler.make_env()
        chunks = sampler.sample(num_timesteps=num_envs)
        assert {c.t_start for c in chunks if len(c)} == {0}
        assert {c.episode_id for c in chunks if not len(c)} == (
            {*_episodes(before)} if mode == "num_timesteps" else set()
        )
        assert _resets(sampler) == num_envs


# -- callbacks --------------------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
@MODES
def test_counts_of_callbacks(kind: Kind, num_envs: int, mode: str) -> None:
    """Created = started = ended = m for m episodes, when the m-th ends with none begun after it."""
    seen = Recording()
    with kind.runner(num_envs, callbacks=[seen]) as sampler:
        assert _counts(seen.told) == {"on_environment_created": num_envs}
        seen.told.clear()
        if mode == "num_episodes":
            sampler.sample(num_episodes=5)
            episodes = _up(5, num_envs)
            expected = {"created": episodes, "start": episodes, "step": episodes * LENGTH, "end": episodes}
        else:
            sampler.sample(num_timesteps=(2 * LENGTH + 20) * num_envs)
            started, ended = 3 * num_envs, 2 * num_envs
            expected = {"created": started, "start": started, "step": 120 * num_envs, "end": ended}
        counts = _counts(seen.told)
        assert counts.pop("on_sample_end") == 1
        assert counts == {f"on_episode_{event}": count for event, count in expected.items()}
        assert _resets(sampler) == expected["start"]


@KINDS
@WIDTHS
@MODES
def test_order_of_callbacks(kind: Kind, num_envs: int, mode: str) -> None:
    """Of each env's own events; and on_sample_end is told after all, with what is returned."""
    seen = Recording()
    with kind.runner(num_envs, length=2, callbacks=[seen]) as sampler:
        seen.told.clear()
        samples = sampler.sample(**{mode: 4 * num_envs if mode == "num_timesteps" else 2 * num_envs})
    once = [f"on_episode_{event}" for event in ("created", "start", "step", "step", "end")]
    # A call for time steps has the next episode under way when it returns.
    expected = once * 2 + (once[:2] if mode == "num_timesteps" else [])
    last, arguments = seen.told.pop()
    assert (last, arguments["samples"]) == ("on_sample_end", samples)
    for index in range(num_envs):
        assert [event for event, a in seen.told if a["env_index"] == index] == expected


# -- metrics ----------------------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
@MODES
def test_numbers_of_whole_episodes_in_metrics(kind: Kind, num_envs: int, mode: str) -> None:
    """50 steps, 50 steps, 50 steps: each call is one episode of each env, and so are its figures."""
    with kind.runner(num_envs) as sampler:
        for call in range(1, 4):
            size = num_envs if mode == "num_episodes" else LENGTH * num_envs
            chunks = sampler.sample(**{mode: size})
            agents = sorted({c.agent_id for c in chunks})
            report = sampler.get_metrics()
            assert report["num_env_steps_sampled"] == LENGTH * num_envs
            assert report["num_env_steps_sampled_lifetime"] == LENGTH * call * num_envs
            assert report["num_episodes"] == num_envs
            assert report["num_agent_steps_sampled"] == dict.fromkeys(agents, LENGTH * num_envs)
            assert sum(report["num_module_steps_sampled"].values()) == LENGTH * num_envs * kind.agents
            assert {report[f"episode_len_{figure}"] for figure in ("mean", "min", "max")} == {LENGTH}
            whole = sum(t + agent for t in range(1, LENGTH + 1) for agent in range(kind.agents))
            assert {report[f"episode_return_{figure}"] for figure in ("mean", "min", "max")} == {whole}
            assert report["agent_steps"] == dict.fromkeys(agents, LENGTH)
            assert sum(report["agent_episode_returns_mean"].values()) == whole
            assert sum(report["module_episode_returns_mean"].values()) == whole


@KINDS
@WIDTHS
def test_numbers_of_fragments_in_metrics(kind: Kind, num_envs: int) -> None:
    """An episode of 50 in fragments of 20 counts with the third, once."""
    finished = []
    with kind.runner(num_envs) as sampler:
        for _ in range(5):
            sampler.sample(num_timesteps=20 * num_envs)
            report = sampler.get_metrics()
            assert report["num_env_steps_sampled"] == 20 * num_envs
            finished.append(report["num_episodes"])
            assert report.get("episode_len_mean", LENGTH) == LENGTH
        assert report["num_episodes_lifetime"] == 2 * num_envs
    assert finished == [0, 0, num_envs, 0, num_envs]


# -- how actions are chosen -------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
@MODES
def test_every_step_says_how_it_was_chosen(kind: Kind, num_envs: int, mode: str) -> None:
    with kind.runner(num_envs, explore=False) as sampler:
        for settings, explore, random_actions in (
            ({}, False, False),
            ({"explore": True}, True, False),
            ({"random_actions": True}, False, True),
        ):
            for c in sampler.sample(**{mode: num_envs}, **settings):
                assert (c.explore, c.random_actions) == (explore, random_actions)
                assert c.weights_seq.tolist() == [0] * len(c)
                assert ("logp" in c.columns) is not random_actions or not len(c)
