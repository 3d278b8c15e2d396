"""One failing multi-agent env costs only what its own agents had open; its siblings never notice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.errors import EnvContractError, EnvRestartBudgetError, ModuleError
from headrace.workers.envs import restarts
from headrace.workers.policy.module_weights import read_weights
from support.envs.toy_agents import Schedule, Together, check_books, multi_runner

Answer = tuple[dict[Any, Any], ...]


class Faulty(Together):
    """Env 0 (of `config["faulty"]`) does `fault` to the answer of each step of number `at`."""

    fault: Callable[[Answer], Any]
    at = 3
    faulty = (0,)

    def step(self, actions: dict[Any, Any]) -> Any:
        answer = super().step(actions)
        return type(self).fault(answer) if self.index in self.faulty and self.t == self.at else answer


def _with(fault: Callable[[Answer], Any], at: int = 3, faulty: tuple[int, ...] = (0,)) -> type[Faulty]:
    return type("FaultyNow", (Faulty,), {"fault": staticmethod(fault), "at": at, "faulty": faulty})


def _raise(answer: Answer) -> Answer:
    raise RuntimeError("diverged")


def _lives(sampler: Any, fragments: int) -> dict[int, list[EpisodeChunk]]:
    lives = defaultdict(list)
    for _ in range(fragments):
        for chunk in sampler.sample_fragment():
            lives[chunk.env_index].append(chunk)
        check_books(sampler)
    return lives


def _key(chunk: EpisodeChunk) -> Any:
    return chunk.episode_id, chunk.agent_id, chunk.chunk_index


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backoff_s", [0.0, 0.004])
@pytest.mark.parametrize("policies", [["shared"], ["a0", "a1", "a2"]])
def test_siblings_of_failing_envs_are_the_same_to_the_bit(
    backoff_s: float, policies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", backoff_s)
    faulty, truth = (1, 2), []  # type: ignore[var-annotated]

    def creator(fails: float) -> Any:
        return lambda c: Schedule(c.vector_index, truth, 3, fails if c.vector_index in faulty else 0.0)

    settings: dict[str, Any] = {
        "num_envs": 5,
        "rollout_fragment_length": 20,
        "policies": policies,
        "env_restart_attempts": 1000,
    }
    with multi_runner(creator(0.0), **settings) as sound, multi_runner(creator(0.15), **settings) as sampler:
        expected, lives = _lives(sound, 25), _lives(sampler, 25)
        assert sampler.totals.env_failures > 20
    for index in set(range(5)) - set(faulty):
        ours, theirs = sorted(lives[index], key=_key), sorted(expected[index], key=_key)
        assert list(map(_key, ours)) == list(map(_key, theirs))
        for one, other in zip(ours, theirs, strict=True):
            assert (one.seed, one.end, one.t_start) == (other.seed, other.end, other.t_start)
            for name in ("obs", "actions", "rewards", "env_t"):
                assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
            for name in ("logp", "values", "action_dist_inputs"):
                assert one.columns[name].tobytes() == other.columns[name].tobytes()


def test_all_agents_of_a_failed_env_end_with_a_marker_if_a_part_was_shipped() -> None:
    with multi_runner(_with(_raise, at=5), num_envs=2, env_config={"lengths": [9, 9, 2]}) as sampler:
        begun = sampler.sample(num_timesteps=6)
        chunks = sampler.sample(num_timesteps=8, end_markers=True)
        markers = [c for c in chunks if not len(c)]
        assert {(m.agent_id, m.env_index, m.chunk_index, m.t_start) for m in markers} == {
            ("a0", 0, 1, 3),
            ("a1", 0, 1, 3),
        }
        assert {(m.end, m.end_reason) for m in markers} == {(ChunkEnd.ABORTED, "env_exception")}
        assert {m.episode_id for m in markers} == {c.episode_id for c in begun if c.env_index == 0}
        assert next(c for c in begun if c.agent_id == "a2").is_done
        assert sampler.totals.discarded == {"env_exception": 2}
        check_books(sampler)


def test_counters_include_delivered_steps_only_and_keep_finished_episodes() -> None:
    with multi_runner(_with(_raise, at=4), num_envs=2, env_config={"lengths": [5, 5]}, num_workers=1) as sampler:
        finished = {c.episode_id for c in sampler.sample(num_timesteps=12) if c.is_done}
        metrics = sampler.get_metrics()
    assert len(finished) == metrics["num_episodes"] == 1
    assert metrics["num_agent_steps_sampled"] == {"a0": 8, "a1": 8}
    assert metrics["num_env_steps_sampled"] == 8
    assert sampler.totals.discarded == {"env_exception": 6}
    assert metrics["num_env_step_failures_lifetime"] == 1


def _change(part: int, key: Any, value: Any) -> Callable[[Answer], Any]:
    def fault(answer: Answer) -> Any:
        parts = [dict(piece) for piece in answer]
        parts[part][key] = value
        return tuple(parts)

    return fault


BAD = {
    "four parts": (lambda answer: answer[:4], "answer of step"),
    "no dicts": (lambda answer: (1, *answer[1:]), "observations should be a dict"),
    "observation of wrong shape": (_change(0, "a0", np.zeros(4, np.float32)), r"observation should be float32 \(3,\)"),
    "NaN": (_change(0, "a1", np.full(3, np.nan, np.float32)), "free of NaN"),
    "reward": (_change(1, "a0", float("inf")), r"Reward should be finite scalar, got inf .*Actions=\{'a0'"),
    "reward of nobody": (_change(1, "who", 1.0), "agent should be one of possible_agents"),
    "observation of nobody": (_change(0, "who", np.zeros(3, np.float32)), "agent should be one of possible_agents"),
    "flag": (_change(2, "a0", "yes"), "terminated and truncated should be bools"),
    "no word of all": (lambda answer: (*answer[:2], {"a0": False}, *answer[3:]), "__all__"),
    "info": (_change(4, "a0", 3), "info should be a dict"),
    "of one that is done": (_change(0, "a2", np.zeros(3, np.float32)), "observations should be of live agents only"),
    "reward of one that is done": (_change(1, "a2", 1.0), "rewards should be of live agents only, got 1.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_of_step_is_an_env_failure_that_names_the_problem(case: str) -> None:
    fault, words = BAD[case]
    env = _with(fault)
    settings = {"env_config": {"lengths": [6, 6, 2]}, "num_envs": 2}
    with multi_runner(env, restart_failed_sub_environments=False, **settings) as sampler:
        with pytest.raises(EnvContractError, match=words):
            sampler.sample(num_timesteps=8)
        check_books(sampler)
    with multi_runner(env, **settings) as sampler:
        chunks = sampler.sample(num_timesteps=8)
        assert {c.env_index for c in chunks if c.agent_id == "a0"} == {0, 1}
        assert sampler.totals.discarded == {"env_bad_data": 6}
        check_books(sampler)


@pytest.mark.parametrize("answer", [3, ({}, 1), ([], {}), ({"who": 1}, {}), ({"a0": np.zeros(9)}, {})])
def test_a_bad_reset_is_a_failure_within_the_budget(answer: Any) -> None:
    class BadReset(Together):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return answer

    with multi_runner(BadReset, env_restart_attempts=3) as sampler:
        with pytest.raises(EnvRestartBudgetError) as caught:
            sampler.sample(num_timesteps=1)
        assert isinstance(caught.value.__cause__, EnvContractError)


class NoLastWord(Together):
    """a0 is truncated at its length without a final observation."""

    def step(self, actions: dict[Any, Any]) -> Any:
        seen, rewards, terminateds, _, infos = super().step(actions)
        if terminateds.get("a0"):
            del seen["a0"]
            return seen, rewards, {**terminateds, "a0": False}, {"a0": True}, infos
        return seen, rewards, terminateds, {}, infos


def test_a_missing_final_observation_is_an_error_unless_the_config_says_otherwise() -> None:
    with multi_runner(NoLastWord, restart_failed_sub_environments=False, env_config={"lengths": [4, 6]}) as sampler:
        with pytest.raises(EnvContractError, match=r"missing_final_observation.*got none of agent 'a0'"):
            sampler.sample(num_timesteps=6)
        assert sampler.totals.discarded == {"env_bad_data": 8}
        check_books(sampler)


@pytest.mark.parametrize("length", [6, 3, 1])
@pytest.mark.parametrize("how", ["repeat", "drop"])
def test_a_missing_final_observation_is_repeated_or_its_step_dropped(how: str, length: int) -> None:
    settings = {"missing_final_observation": how, "rollout_fragment_length": length, "env_config": {"lengths": [4, 6]}}
    with multi_runner(NoLastWord, **settings) as sampler:  # type: ignore[arg-type]
        chunks: list[EpisodeChunk] = []
        while sampler.totals.episodes < 1:
            chunks += sampler.sample_fragment()
        metrics = sampler.get_metrics()
        check_books(sampler)
    mine = [c for c in chunks if c.agent_id == "a0" and c.episode_id == chunks[0].episode_id]
    seen = [row for c in mine for row in c.obs[:-1, 0]] + list(next(c for c in mine[::-1] if len(c)).obs[-1:, 0])
    repeated, dropped = (metrics[f"num_final_{name}_lifetime"] for name in ("observations_repeated", "steps_dropped"))
    if how == "repeat":
        assert mine[-1].is_truncated
        assert sum(map(len, mine)) == 4
        assert seen == [0, 1, 2, 3, 3]
        assert (repeated, dropped, sampler.totals.discarded) == (1, 0, {})
    else:
        assert sum(map(len, mine)) == 3
        assert seen == [0, 1, 2, 3]
        assert (repeated, dropped, sampler.totals.discarded) == (0, 1, {"env_bad_data": 1})
        assert metrics["agent_rewards_lost_lifetime"] == 4.0
        assert mine[-1].is_truncated or (mine[-1].end_reason, len(mine[-1])) == ("env_bad_data", 0)


def test_make_env_closes_envs_and_aborts_episodes_and_stop_works_twice() -> None:
    sampler = multi_runner(num_envs=2, env_config={"lengths": [9, 9]})
    sampler.assert_healthy()
    sampler.sample(num_timesteps=4)
    old = [lane.env for lane in sampler._sampler.envs.lanes]
    sampler.make_env()
    assert [env.closed for env in old] == [1, 1]  # type: ignore[union-attr]
    chunks = sampler.sample(num_timesteps=2, end_markers=True)
    assert [c.end_reason for c in chunks if not len(c)] == ["reset"] * 4
    check_books(sampler)
    sampler.stop()
    sampler.stop()
    with pytest.raises(AssertionError):
        sampler.assert_healthy()


def test_discard_open_gives_a_marker_for_every_agent() -> None:
    with multi_runner(num_envs=2, env_config={"lengths": [9, 9]}) as sampler:
        sampler.sample(num_timesteps=4)
        sampler._begin(sampler._sampler.steps.mode, 4, force_reset=False)
        sampler._sampler.poll(0)
        batches = sampler.discard_open(Discard.SHUTDOWN)
        assert [(c.end_reason, len(c)) for c in batches] == [("shutdown", 0)] * 4
        assert sampler.totals.discarded == {"shutdown": 4}
        assert sampler.totals.open == 0
        check_books(sampler)


def test_weights_go_to_the_modules_that_they_name_and_others_are_frozen() -> None:
    with multi_runner(policies={"a0": None, "a1": None}) as sampler:
        state = sampler.get_state()
        zeros = {name: np.zeros_like(array) for name, array in state["rl_module"]["a0"].items()}
        sampler.set_weights({"a0": zeros}, seq=2)
        now = sampler.get_state()["rl_module"]
        assert not any(array.any() for array in now["a0"].values())
        assert all(np.array_equal(now["a1"][name], array) for name, array in state["rl_module"]["a1"].items())
        with pytest.raises(ModuleError, match="there is no module 'who'"):
            sampler.set_weights({"a1": zeros, "who": zeros}, seq=3)
        with pytest.raises(ModuleError, match="do not fit"):
            sampler.set_weights({"a1": zeros, "a0": {}}, seq=3)
        assert sampler.weights_version == (0, 2)
        module = sampler.modules["a1"]
        assert module is not None
        assert any(array.any() for array in read_weights(module).values())
        sampler.set_state({**state, "weights_seq_no": 1})
        assert sampler.weights_version == (0, 2)
        sampler.set_state({**state, "weights_seq_no": 3})
        assert all(
            np.array_equal(array, state["rl_module"]["a0"][name])
            for name, array in sampler.get_state()["rl_module"]["a0"].items()
        )
