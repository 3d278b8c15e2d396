"""An env in which no agent ever acts again fails with a typed error; an env that only pauses continues."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError, EnvRestartBudgetError
from headrace.workers.agents import lane_report
from headrace.workers.agents.acting_seats import acting_seats
from headrace.workers.agents.episodes import MultiAgentEpisode
from headrace.workers.envs.lane import Lane
from support.envs.toy_agents import Together, check_books, multi_runner


class Pausing(Together):
    """Env 0 observes nobody in `config["pause"]` steps after its third one, if ever somebody again."""

    paused = 0

    def reset(self, **settings: Any) -> Any:
        self.paused = 0
        return super().reset(**settings)

    def step(self, actions: dict[Any, Any]) -> Any:
        if self.index == 0 and self.t == 3 and self.paused <= self.config["pause"]:
            self.paused += 1
            if self.paused <= self.config["pause"]:
                return {}, {}, {"__all__": False}, {}, {}
            seen = {f"a{i}": self.observe(i) for i in range(len(self.lengths))}
            return seen, {}, {"__all__": False}, {}, {}
        return super().step(actions)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_report, "MOST_IDLE_STEPS", 20)


def test_an_env_without_acting_agents_fails_with_a_typed_error() -> None:
    settings = {"num_envs": 2, "env_config": {"pause": 10**9}}
    words = r"env steps in a row in which no agent acts should be at most 20, .* got 21"
    with multi_runner(Pausing, env_restart_attempts=2, **settings) as sampler:
        with pytest.raises(EnvRestartBudgetError, match=words):
            sampler.sample(num_episodes=1000)
        assert sampler.totals.env_failures == 3
        check_books(sampler)
    with (
        multi_runner(Pausing, restart_failed_sub_environments=False, **settings) as sampler,
        pytest.raises(EnvContractError, match=words),
    ):
        sampler.sample(num_episodes=1000)


def test_a_pause_is_no_failure_and_each_pause_is_counted_from_zero() -> None:
    with multi_runner(Pausing, num_envs=1, env_config={"pause": 19}) as sampler:
        chunks = sampler.sample(num_episodes=3)
        assert {chunk.end for chunk in chunks} == {ChunkEnd.TERMINATED}
        assert sampler.totals.env_failures == 0
        check_books(sampler)


def test_the_acting_seats_are_read_again_for_another_turn_and_for_another_episode() -> None:
    lane = Lane(0, seeds=cast(Any, None), budget=cast(Any, None))
    lane.episode = episode = lane.create_episode(None, MultiAgentEpisode)
    acting = acting_seats([lane])
    assert acting_seats([lane], acting) is acting
    episode.let_act([])
    another_turn = acting_seats([lane], acting)
    assert another_turn is not acting
    lane.episode = lane.create_episode(None, MultiAgentEpisode)
    lane.episode.let_act([])
    another_episode = acting_seats([lane], another_turn)
    assert another_episode.lanes == [(lane, lane.episode)]
    lane.release()
    assert not acting_seats([lane], another_episode).lanes
