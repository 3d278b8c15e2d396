"""Multi-agent envs in processes and on other hosts give the chunks of inline envs, also when one of them fails."""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.errors import ConfigError, EnvContractError, EnvError
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, SingleAgentEnvRunner
from support.envs.crowd import policy_of
from support.envs.toy_agents import check_books
from support.fleets.env_hosts import EnvHosts
from support.runners.process_driver import descriptors
from support.waiting import wait_until

pytestmark = pytest.mark.processes

CROWD: dict[str, Any] = {
    "env": "support.envs.crowd:Crowd",
    "policies": ["masked", "pushes"],
    "policy_mapping_fn": policy_of,
    "missing_final_observation": "repeat",
}
TURNS: dict[str, Any] = {"env": "pettingzoo.classic.tictactoe_v3:env", "policies": ["one"]}
TOGETHER: dict[str, Any] = {"env": "pettingzoo.classic.rps_v2:parallel_env", "policies": ["player_0", "player_1"]}
LANES = 4


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[EnvHosts]:
    with EnvHosts(tmp_path) as started:
        yield started


def runner(placement: str, on_wait: Any = None, **settings: Any) -> MultiAgentEnvRunner:
    defaults = {"num_envs": LANES, "seed": 5, "rollout_fragment_length": 15, "envs_per_process": 2}
    defaults |= {"max_env_seed": 2**31 - 1}
    config = EnvRunnerConfig(**{**defaults, "env_placement": placement, **settings})
    return MultiAgentEnvRunner(config, run_uid="test", on_wait=on_wait)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value.tobytes() if isinstance(value, np.ndarray) else value


def brief(chunk: EpisodeChunk) -> tuple[Any, ...]:
    """Return all parts of the chunk in a form that compares by value."""
    who = (chunk.episode_id, chunk.agent_id, chunk.module_id, chunk.chunk_index, chunk.t_start, chunk.end, chunk.seed)
    arrays = (chunk.obs, chunk.actions, chunk.rewards, chunk.env_t, chunk.columns)
    return (*who, *map(_plain, arrays), chunk.infos)


def sampled(sampler: MultiAgentEnvRunner) -> Any:
    chunks = [chunk for _ in range(4) for chunk in sampler.sample_fragment()]
    chunks += sampler.sample(num_timesteps=30, random_actions=True)
    chunks += sampler.sample(num_episodes=LANES)
    check_books(sampler)
    return [brief(chunk) for chunk in chunks], sampler.totals, sampler.get_spaces()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("settings", [CROWD, {**CROWD, "missing_final_observation": "drop"}, TURNS, TOGETHER])
@pytest.mark.filterwarnings("ignore")  # of PettingZoo about others
def test_envs_in_processes_give_bit_identical_chunks_to_inline_envs(settings: dict[str, Any]) -> None:
    found = []
    for placement in ("inline", "process"):
        with runner(placement, **settings) as sampler:
            found.append(sampled(sampler))
    assert found[0][1].episodes > LANES
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
def test_envs_on_an_env_host_give_bit_identical_chunks_to_inline_envs(hosts: EnvHosts) -> None:
    """The host gets no setting that says that its envs are of several agents."""
    hosts.start(TURNS["env"], LANES)
    found = []
    for placement in ("inline", "remote"):
        with runner(placement, **hosts.at, **TURNS) as sampler:
            found.append(sampled(sampler))
    assert found[0] == found[1]


def test_replacing_processes_changes_nothing() -> None:
    with runner("inline", **CROWD) as inline, runner("process", env_process_max_episodes=8, **CROWD) as replaced:
        assert sampled(inline) == sampled(replaced)
        assert replaced.totals.episodes > 2 * 8


# -- faults -----------------------------------------------------------------------------------------------------------


def live(placement: str, num_envs: int, **settings: Any) -> tuple[dict[int, list[Any]], MultiAgentEnvRunner]:
    """By env: its chunks of four fragments. Sampling ends when every env is back."""
    lives: dict[int, list[Any]] = defaultdict(list)
    with runner(placement, num_envs=num_envs, **{**CROWD, **settings}) as sampler:
        for _ in range(4):
            for chunk in sampler.sample_fragment():
                lives[chunk.env_index].append(brief(chunk))
            check_books(sampler)
        while sampler._sampler.envs.repairing:
            sampler.sample_fragment()
        for chunk in sampler.discard_open(Discard.SHUTDOWN):
            assert chunk.is_done or chunk.end is ChunkEnd.ABORTED
        assert sampler.totals.open == 0
        check_books(sampler)
    return lives, sampler


def faults(at: str, by_lane: dict[int, str]) -> dict[str, Any]:
    return {"faults": {str(lane): {at: fault} for lane, fault in by_lane.items()}}


BAD_DATA = {
    "four parts": "answer of step should be",
    "no dicts": "observations should be a dict",
    "no word of all": "__all__",
    "NaN reward": r"Reward should be finite scalar, got nan .*Actions=\{",
    "array reward": "Reward should be finite scalar",
    "reward of nobody": "agent should be one of possible_agents",
    "observation of wrong shape": r"'1 3'.*should be float32 \(3,\), got float32 \(4,\)",
    "observation of wrong dtype": r"'1 3'.*should be float32",
    "observation outside": r"'1 3'.*should be within",
    "NaN within": r"red/1.*'at'.*should be free of NaN",
    "observation of nobody": "agent should be one of possible_agents",
    "flag": "terminated and truncated should be bools",
    "list info": "info should be a dict, got .* of agent 'blue'",
    "raises": "RuntimeError: diverged",
}


def test_bad_data_or_an_exception_in_a_step_fails_that_env_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Each env with an odd index has one fault in its steps."""
    by_lane = {2 * i + 1: fault for i, fault in enumerate(BAD_DATA)}
    width = 2 * len(BAD_DATA)
    settings = {"env_config": faults("step", by_lane), "envs_per_process": width // 2}
    sound, (lives, sampler) = live("inline", width)[0], live("process", width, **settings)
    assert sampler.totals.discarded.keys() == {"env_bad_data", "env_exception", "shutdown"}
    assert sampler.totals.env_failures == sampler.totals.env_rebuilds == len(BAD_DATA)
    told = {int(r.env_index): r.getMessage() for r in caplog.records if hasattr(r, "env_index")}
    for lane, fault in by_lane.items():
        assert re.search(BAD_DATA[fault], told[lane])
        assert lives[lane]
    for lane in set(range(width)) - by_lane.keys():
        assert lives[lane] == sound[lane]


LOST = {1: "segfaults", 3: "hangs with the lock", 5: "exits"}


def check_lost(lives: dict[int, list[Any]], sampler: MultiAgentEnvRunner) -> None:
    sound = live("inline", 8)[0]
    # Steps are open at the end, unless all other episodes have just ended.
    assert sampler.totals.discarded.keys() - {"shutdown"} == {"env_crash", "env_hang", "env_neighbour"}
    assert sampler.totals.env_failures == 3
    assert sampler.totals.env_rebuilds == 6
    assert lives[6] == sound[6]
    assert lives[7] == sound[7]


def test_a_process_that_is_lost_costs_the_steps_of_its_envs_alone() -> None:
    check_lost(*live("process", 8, env_config=faults("step", LOST), env_step_timeout_s=1.0))


@pytest.mark.thorough
def test_a_lost_process_on_an_env_host_costs_only_the_steps_of_its_envs(hosts: EnvHosts) -> None:
    config = orjson.dumps(faults("step", LOST)).decode()
    hosts.start(str(CROWD["env"]), 8, f"sampling.env_config={config}", "sampling.env_step_timeout_s=1.0")
    check_lost(*live("remote", 8, **hosts.at))


def test_a_first_reset_that_fails_is_tried_again() -> None:
    config = faults("reset", {1: "hangs", 3: "raises"})
    sound, (lives, sampler) = live("inline", 6)[0], live("process", 6, env_config=config, env_reset_timeout_s=1.0)
    assert (sampler.totals.env_failures, sampler.totals.env_rebuilds) == (2, 3)
    assert sampler.totals.discarded.keys() <= {"shutdown"}
    for lane in (2, 4, 5):
        assert lives[lane] == sound[lane]


def test_a_host_that_is_lost_costs_the_steps_of_its_envs_alone(hosts: EnvHosts) -> None:
    def all_act() -> bool:
        return {chunk.env_index for chunk in sampler.sample_fragment() if len(chunk)} == set(range(LANES))

    first = hosts.start(str(CROWD["env"]), 2)
    with runner("remote", **hosts.at, env_hosts_lease_s=1.0, **CROWD) as sampler:
        hosts.start(str(CROWD["env"]), 4)  # two places more than are needed
        wait_until(all_act, what="steps of all envs")
        polls = iter(range(1000))
        sampler.sample_fragment(lambda: first.kill() if next(polls) == 5 else None)
        assert sampler.totals.discarded["env_host_lost"] > 0
        wait_until(all_act, what="envs in the spare places")
        check_books(sampler)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_an_agent_id_that_is_a_tuple_is_refused_in_an_env_process() -> None:
    with pytest.raises(EnvError, match=r"agent id should be text or a whole number .*got \(1, 2\) \(tuple\)"):
        runner("process", env="support.envs.crowd:Ids", policies=["one"])


def test_a_runner_refuses_envs_of_the_other_kind_in_processes() -> None:
    with pytest.raises(EnvContractError, match="a single-agent env needs SingleAgentEnvRunner"):
        runner("process", env="CartPole-v1", policies=["one"], num_envs=1)
    with pytest.raises(EnvContractError, match="for an env of several agents give `policies`"):
        SingleAgentEnvRunner(EnvRunnerConfig(env="support.envs.crowd:Crowd", env_placement="process"))


def test_policies_that_do_not_fit_leave_no_process_behind() -> None:
    gc.collect()
    before = descriptors()
    with pytest.raises(ConfigError, match="must be mapped to one of the policies"):
        runner("process", **{**CROWD, "policy_mapping_fn": lambda agent, episode_id: "nobody"})
    gc.collect()
    assert descriptors() == before


class _Enough(Exception):
    pass


def test_a_host_with_envs_of_the_other_kind_is_refused_on_both_sides(hosts: EnvHosts) -> None:
    words = "its envs are of several agents, and those of this worker of one"

    def look(_: str) -> None:
        if words in hosts.log(0).read_text():
            raise _Enough

    hosts.start(str(CROWD["env"]), 1)
    config = EnvRunnerConfig(env_placement="remote", **hosts.at)
    with pytest.raises(_Enough):
        SingleAgentEnvRunner(config, on_wait=look)
