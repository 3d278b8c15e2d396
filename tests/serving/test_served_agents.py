"""External clients drive episodes of several agents, and the learner gets them as they were played."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd, to_episode
from headrace.schemas.errors import EnvContractError
from headrace.schemas.errors.episodes import EpisodeAbortedError
from headrace.workers.connectors import FrameStack
from headrace.workers.serving.client import PolicyClient
from support.refusals import refused
from support.serving.agent_lives import Life, check
from support.serving.lost_answers import unanswered
from support.serving.served_agents import ByHttp, ByZmq, Rule, rule, served_agents
from support.waiting import TIMEOUT_S, wait_until

WAYS = pytest.mark.parametrize("way", [ByZmq, ByHttp])


@WAYS
def test_the_learner_gets_each_agents_episode_as_it_was_played(way: Any) -> None:
    agents = ("red", "blue", "late")
    with served_agents(agents) as served:

        def live(seed: int) -> Life:
            client = way(served, f"s-{seed}")
            try:
                return Life(seed, agents).play(client)
            finally:
                client.close()

        with ThreadPoolExecutor(4) as pool:
            lives = list(pool.map(live, range(8)))
    assert any(life.ends for life in lives)
    check(served.chunks, lives)


def test_the_python_client_takes_dicts_by_agent_nested_spaces_and_int_ids() -> None:
    with served_agents(("red", 3, "deep")) as served, PolicyClient(served.endpoint, timeout_s=TIMEOUT_S) as client:
        assert list(client.spaces) == ["red", "3", "deep"]  # type: ignore[arg-type]
        episode = client.start_episode()
        deep = {"at": (np.array([5, 1], np.float32), 2), "arm": [0.5, -0.5]}
        told = client.get_action(episode, {"red": [1, 2], 3: np.array([2, 2], np.float32), "deep": deep})
        assert {agent: int(action) for agent, action in told.items()} == {"red": 9, 3: 16, "deep": rule(deep)}
        client.log_returns(episode, {"red": 1.0, 3: 2.0}, {3: {"k": 1}}, {"red": np.bool_(True), "__all__": False})
        client.log_returns(episode, {3: 0.5, "deep": 4})
        client.log_action(episode, {3: [3, 2], "deep": deep}, {3: 77, "deep": 78})
        client.log_returns(episode, {"red": 0.0, 3: 1.0}, None, {"red": True})  # as envs that fill their dicts do
        client.end_episode(episode, {3: [4, 2], "deep": deep}, truncated=True)
    whole = {
        chunk.agent_id: to_episode([c for c in served.chunks if c.agent_id == chunk.agent_id])
        for chunk in served.chunks
    }
    assert whole["red"].rewards.tolist() == [1.0]
    assert whole["red"].is_terminated
    assert (whole["3"].rewards.tolist(), whole["3"].actions.tolist()) == ([2.5, 1.0], [16, 77])
    assert whole["3"].columns["off_policy"].tolist() == [False, True]
    assert whole["3"].infos[1] == {"k": 1}
    assert (whole["deep"].rewards.tolist(), whole["deep"].module_id) == ([4.0, 0.0], "deep")
    assert whole["deep"].obs["at"][1].tolist() == [2, 2, 2]


@pytest.mark.parametrize("taken", [False, True])
def test_what_is_logged_of_agents_before_a_repetition_goes_with_the_next_step(taken: bool) -> None:
    """Earlier, it was lost where the server had taken the step without an answer."""
    with served_agents() as served, PolicyClient(served.endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode()
        both = [{"red": [t, 1], "blue": [t, 2]} for t in range(3)]
        client.get_action(episode, both[0])
        client.log_returns(episode, {"red": 1.0, "blue": 2.0})
        with unanswered(taken=taken):
            client.get_action(episode, both[1])
        client.log_returns(episode, {"red": 10.0, "blue": 20.0}, {"blue": {"last": 1}}, {"blue": True})
        with refused("step_order"):
            client.get_action(episode, {"red": [1, 1]})
        client.get_action(episode, both[1])
        client.end_episode(episode, both[2])
    whole = {a: to_episode([c for c in served.chunks if c.agent_id == a]) for a in ("red", "blue")}
    assert {a: own.rewards.tolist() for a, own in whole.items()} == {"red": [1.0, 10.0], "blue": [2.0, 20.0]}
    assert whole["blue"].infos[2] == {"last": 1}


def test_a_repetition_that_the_server_refuses_may_be_corrected() -> None:
    with served_agents() as served, PolicyClient(served.endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode()
        client.get_action(episode, {"red": [0, 1], "blue": [0, 2]})
        client.log_returns(episode, {"red": 1.0, "blue": 2.0}, multiagent_truncated_dict={"blue": True})
        with unanswered(taken=False):
            client.get_action(episode, {"red": [1, 1]})
        client.log_returns(episode, {"red": 10.0})
        with pytest.raises(EnvContractError, match="observations should be their final ones too"):
            client.get_action(episode, {"red": [1, 1]})
        client.get_action(episode, {"red": [1, 1], "blue": [1, 2]})
        client.log_returns(episode, {"red": 100.0})
        client.end_episode(episode, {"red": [2, 1]})
    whole = {a: to_episode([c for c in served.chunks if c.agent_id == a]) for a in ("red", "blue")}
    assert {a: own.rewards.tolist() for a, own in whole.items()} == {"red": [11.0, 100.0], "blue": [2.0]}
    assert whole["blue"].is_truncated


@WAYS
def test_a_repeated_step_gets_the_same_answer_and_is_one_step(way: Any) -> None:
    with served_agents() as served:
        client = way(served, "again")
        client.start("e")
        first = client.step("e", 0, {"red": [1, 2], "blue": [2, 2]})
        for _ in range(2):
            assert client.step("e", 0, {"red": [1, 2], "blue": [2, 2]}) == first
        news = {"reward": {"red": 3.0, "blue": 1.0}, "terminated": {"blue": True}}
        second = client.step("e", 1, {"red": [2, 2]}, **news)
        assert client.step("e", 1, {"red": [2, 2]}, **news) == second
        client.step("e", 2, {"red": [3, 2]}, terminated={"red": True, "__all__": True})
        client.close()
    rewards: dict[str, list[float]] = {"red": [], "blue": []}
    for chunk in served.chunks:  # where the machine is slow, an agent has more than one
        rewards[str(chunk.agent_id)] += chunk.rewards.tolist()
    assert rewards == {"red": [3.0, 0.0], "blue": [1.0]}
    ends = {chunk.agent_id: chunk.is_terminated for chunk in served.chunks}
    assert ends == {"red": True, "blue": True}


@WAYS
def test_an_untrained_episode_is_counted_and_not_sent_to_the_learner(way: Any) -> None:
    with served_agents() as served:
        client = way(served, "untrained")
        client.start("e", training_enabled=False)
        client.step("e", 0, {"red": [1, 2], "blue": [1, 2]})
        client.step("e", 1, {"red": [2, 2]}, truncated={"__all__": True}, terminated={"blue": True})
        client.close()
    assert served.chunks == []
    assert served.runner.totals.discarded == {"training_disabled": 2}


def test_a_client_that_vanishes_leaves_an_aborted_marker_for_each_agent() -> None:
    with served_agents(lease_s=0.4, rollout_fragment_length=2) as served:
        gone, other = ByHttp(served, "gone"), PolicyClient(served.endpoint, timeout_s=TIMEOUT_S)
        gone.start("e")
        mine = other.start_episode()
        for t in range(4):
            gone.step("e", t, {"red": [t, 1], "blue": [t, 1]})
            other.get_action(mine, {"blue": [t, 2]})
        wait_until(lambda: sum(c.end is ChunkEnd.ABORTED for c in served.chunks) == 2, what="the markers")
        assert {(c.agent_id, c.end_reason) for c in served.chunks if c.end is ChunkEnd.ABORTED} == {
            ("red", "client_lost"),
            ("blue", "client_lost"),
        }
        other.end_episode(mine, {"blue": [9, 2]})
        other.close()
        again = ByHttp(served, "gone")
        with pytest.raises(EpisodeAbortedError, match="client_lost"):
            again.start("e")
        again.say("DELETE", "")
    assert sum(len(chunk) for chunk in served.chunks if len(chunk) and chunk.obs[0, 1] == 2) == 4


@WAYS
def test_an_aborted_episode_leaves_other_episodes_of_its_client_alone(way: Any) -> None:
    with served_agents() as served:
        client = way(served, "fell")
        for name in ("e", "f"):
            client.start(name)
            client.step(name, 0, {"red": [1, 2]})
        client.abort("e")
        client.step("f", 1, {"red": [2, 2]}, end="terminated", reward={"red": 1.0})
        client.close()
    assert [chunk.rewards.tolist() for chunk in served.chunks] == [[1.0]]
    assert served.runner.totals.stepped == 1  # the action in "e" had no answer yet


@WAYS
def test_an_episode_may_end_before_any_action_or_without_a_last_observation(way: Any) -> None:
    with served_agents(missing_final_observation="repeat") as served:
        client = way(served, "short")
        for name in ("e", "f"):
            client.start(name)
        assert client.step("e", 0, {"red": [1, 2]}, end="terminated")["next_step"] == 1
        client.step("f", 0, {"red": [1, 2], "blue": [1, 2]})
        client.step("f", 1, {}, reward={"red": 2.0}, truncated={"__all__": True})
        client.close()
    told = {chunk.agent_id: (chunk.rewards.tolist(), chunk.obs.tolist(), chunk.end) for chunk in served.chunks}
    seen = [[1.0, 2.0], [1.0, 2.0]]
    assert told == {"red": ([2.0], seen, ChunkEnd.TRUNCATED), "blue": ([0.0], seen, ChunkEnd.TRUNCATED)}


@WAYS
def test_connectors_stack_the_frames_of_each_agent_separately(way: Any) -> None:
    class Last(Rule):
        """`rule` of the newest of two stacked frames."""

        def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
            return super().forward_exploration({"obs": batch["obs"].reshape(-1, 2, 2).sum(1)})

        forward_inference = forward_train = forward_exploration

    stack = partial(FrameStack, 2)
    with served_agents(env_to_module=[stack], module=lambda spaces: Last()) as served:
        client = way(served, "stacked")
        client.start("e")
        client.step("e", 0, {"red": [1, 2], "blue": [5, 5]})
        client.step("e", 1, {"blue": [6, 5]})
        answer = client.step("e", 2, {"red": [2, 2], "blue": [7, 5]})
        assert answer["action"] == {"red": rule([3, 4]), "blue": rule([13, 10])}
        client.abort("e")
        client.close()
