"""Infos are what the env told at that step, or that env's failure, in every placement."""

from __future__ import annotations

import math
import re
import sys
import threading
from collections import OrderedDict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np
import orjson
import pytest
import torch
from gymnasium.vector import AutoresetMode
from pettingzoo import AECEnv

from headrace.schemas.accounts.env_errors import INFO_LEFT_OUT, MOST_GROUPS
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.info_json import MARK, info_json, read_info
from headrace.schemas.errors import EnvContractError, HeadraceError
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, SingleAgentEnvRunner
from headrace.workers.agents.env import MultiAgentEnv
from headrace.workers.envs.checks import INFO_DEPTH, heard_info, own_info, told_info
from headrace.workers.envs.native.infos import final_infos, infos_by_lane, without_rows
from headrace.workers.envs.vector_env import VectorEnv
from headrace.workers.metrics.totals import RunnerTotals

BOX, TWO = gym.spaces.Box(-np.inf, np.inf, (1,)), gym.spaces.Discrete(2)


class Board:
    """What an env shows in its infos, and changes in place."""

    def __init__(self) -> None:
        objects = np.empty(1, object)
        objects[0] = [0]
        self.told = {"n": 0, "at": np.zeros(2), "deep": {"list": [0], "pair": ([0],)}, "o": objects}

    def tell(self, n: int) -> dict[str, Any]:
        told = self.told
        told["n"], told["at"][:], told["deep"]["list"][0], told["deep"]["pair"][0][0], told["o"][0][0] = n, n, n, n, n
        return told


def numbers(info: Mapping[str, Any]) -> set[int]:
    deep = info["deep"]
    return {int(n) for n in (info["n"], *info["at"], *deep["list"], *deep["pair"][0], info["o"][0][0])}


class Moves(gym.Env[Any, Any]):
    observation_space, action_space = BOX, TWO

    def __init__(self, spoils: bool = False) -> None:
        self._board, self._seen = Board(), np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._n = self._seen[0] = 0
        return self._seen, self._board.tell(0)

    def step(self, action: Any) -> Any:
        self._n += 1
        self._seen[0] = self._n
        return self._seen, 1.0, self._n == 5, False, self._board.tell(self._n)


def make_moves(context: Any) -> Moves:
    return Moves()


class OwnVector(VectorEnv):
    def __init__(self, num_envs: int) -> None:
        super().__init__(BOX, TWO, num_envs)
        self._envs = [Moves() for _ in range(num_envs)]

    def reset_at(self, index: int, *, seed: int | None = None, options: Any = None) -> Any:
        return self._envs[index].reset()

    def vector_step(self, actions: Any) -> Any:
        rows = [
            env.step(0) if action is not None else (np.zeros(1, np.float32), 0.0, False, False, {})
            for env, action in zip(self._envs, actions, strict=True)
        ]
        return tuple(map(list, zip(*rows, strict=True)))

    def restart_at(self, index: int) -> None:
        pass

    def get_sub_environments(self) -> list[Any]:
        return self._envs


class Native(gym.vector.VectorEnv[Any, Any, Any]):
    """Tells rows of its own arrays, without masks."""

    def __init__(self, num_envs: int) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.single_observation_space, self.single_action_space = num_envs, BOX, TWO
        self._infos = {
            "n": np.zeros(num_envs, int),
            "at": np.zeros((num_envs, 2)),
            "version": "1",
            "of": {"a": [[0]] * num_envs},
        }

    def _tell(self, n: int) -> tuple[Any, dict[str, Any]]:
        self._infos["n"][:] = self._infos["at"][:] = n
        self._infos["of"]["a"][0][0] = n
        return np.full((self.num_envs, 1), n, np.float32), self._infos

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._n = 0
        return self._tell(0)

    def step(self, actions: Any) -> Any:
        self._n += 1
        obs, infos = self._tell(self._n)
        flags = np.zeros(self.num_envs, bool)
        return obs, np.ones(self.num_envs), flags, flags, infos


@pytest.mark.parametrize(
    "env", [Moves, lambda context: OwnVector(context.num_envs)], ids=["env", "vector of one's own"]
)
def test_each_info_is_what_the_env_told_at_that_step_though_it_changes_it_in_place(env: Any) -> None:
    with SingleAgentEnvRunner(EnvRunnerConfig(env=env, num_envs=2, seed=0)) as runner:
        for chunk in [*runner.sample(num_timesteps=14), *runner.sample(num_timesteps=8)]:
            assert [numbers(info) for info in chunk.infos] == [{int(n)} for n in chunk.obs[:, 0]]


def test_infos_from_a_process_are_those_of_the_same_env_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    told = []
    for placement in ("inline", "process"):
        config = EnvRunnerConfig(env="test_told_infos:make_moves", seed=0, env_placement=placement)
        with SingleAgentEnvRunner(config) as runner:
            told.append([repr(chunk.infos) for chunk in runner.sample(num_timesteps=7)])
    assert told[0] == told[1], "of the same types"


def test_infos_of_a_native_vector_without_masks_arrive_and_what_has_no_row_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with SingleAgentEnvRunner(EnvRunnerConfig(env=lambda c: Native(c.num_envs), num_envs=2, seed=0)) as runner:
        for chunk in runner.sample(num_timesteps=8):
            assert [info["n"] for info in chunk.infos] == chunk.obs[:, 0].tolist()
            assert [info["at"] for info in chunk.infos] == [[n, n] for n in chunk.obs[:, 0].tolist()]
            assert [info["of"]["a"][0] for info in chunk.infos] == chunk.obs[:, 0].tolist()
            assert all("version" not in info for info in chunk.infos)
    assert caplog.text.count("'version'") == 1


def test_infos_of_a_vector_are_read_as_gymnasium_reads_them() -> None:
    infos = {
        "lives": np.array([3, 4]),
        "won": np.array([True, False]),
        "_won": np.array([True, False]),
        "episode": {"r": np.array([1.5, 2.5]), "_r": np.array([False, True]), "l": np.array([7, 8])},
        "notes": np.array([[1], {"a": 1}], object),
        "text": "ab",
        "three": np.zeros(3),
        "one": np.zeros(()),
        "final_obs": np.zeros((2, 1)),
        "two": [1, 2],
        "_two": np.array([True]),
        "packed": np.array([9]),
        "_packed": np.array([False, True]),
        "deep": {"pair": np.zeros(3)},
    }
    assert infos_by_lane(infos, 2) == {
        0: {"lives": 3, "won": True, "episode": {"l": 7}, "notes": [1]},
        1: {"lives": 4, "episode": {"r": 2.5, "l": 8}, "notes": {"a": 1}},
    }
    assert without_rows(infos, 2) == ["text", "three", "one", "two", "packed", "deep.pair"]
    assert infos_by_lane({"won": infos["won"], "_won": infos["_won"]}, 2) == {0: {"won": True}}
    assert infos_by_lane({"won": infos["won"], "_won": [0, 1]}, 2) == {1: {"won": False}}
    assert infos_by_lane({1: np.array([5, 6])}, 2) == {0: {1: 5}, 1: {1: 6}}


def test_rows_of_some_envs_belong_to_the_envs_that_env_id_names() -> None:
    infos = {"env_id": np.array([3, 1]), "lives": np.array([7, 8]), "players": {"env_id": np.array([3, 1])}}
    told = {
        3: {"env_id": 3, "lives": 7, "players": {"env_id": 3}},
        1: {"env_id": 1, "lives": 8, "players": {"env_id": 1}},
    }
    assert infos_by_lane(infos, 4) == told
    assert infos_by_lane({**infos, "level": np.arange(4)}, 4) == told
    assert without_rows({**infos, "level": np.arange(4)}, 4) == ["level"]
    assert infos_by_lane({"env_id": [1, 0], "lives": np.array([7, 8])}, 2) == {
        1: {"env_id": 1, "lives": 7},
        0: {"env_id": 0, "lives": 8},
    }
    own = {"env_id": np.array([1, 0]), "_env_id": np.array([True, True])}  # of one of gymnasium's vectors
    assert infos_by_lane(own, 2) == {0: {"env_id": 1}, 1: {"env_id": 0}}
    for other in ([3, 3], [1, 4], [0.0, 1.0], [True, False], 3, [-1, 0]):  # they name no envs
        assert infos_by_lane({"env_id": np.array(other), "lives": np.arange(4)}, 4) == {
            i: {"lives": i} for i in range(4)
        }


@pytest.mark.parametrize(
    "finals",
    [{"n": np.arange(3), "_n": np.array([False, True, True])}, [None, {"n": 1}, {"n": 2}]],
    ids=["dict", "rows"],
)
def test_last_infos_are_told_where_the_reset_has_none(finals: Any) -> None:
    assert final_infos({"final_info": finals}, 3) == {1: {"n": 1}, 2: {"n": 2}}


class Last(Moves):
    """Has an info in the last step of an episode alone."""

    def reset(self, **_: Any) -> Any:
        return super().reset()[0], {}

    def step(self, action: Any) -> Any:
        *seen, _ = super().step(action)
        return *seen, {"n": self._n} if self._n == 5 else {}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_last_info_of_an_episode_arrives_from_a_vector_where_the_reset_has_none(mode: AutoresetMode) -> None:
    def make(context: Any) -> gym.vector.SyncVectorEnv:
        return gym.vector.SyncVectorEnv([Last] * context.num_envs, autoreset_mode=mode)

    with SingleAgentEnvRunner(EnvRunnerConfig(env=make, num_envs=2, seed=0)) as runner:
        for chunk in runner.sample(num_episodes=2):
            assert chunk.infos == ([{}] * 5 + [{"n": 5}] if len(chunk) == 5 else [])


class Spoilt(Native):
    """Ends all episodes in its third step, with `infos` that do not fit."""

    def __init__(self, num_envs: int, infos: dict[str, Any]) -> None:
        super().__init__(num_envs)
        self.metadata, self._own = {"autoreset_mode": AutoresetMode.SAME_STEP}, infos

    def step(self, actions: Any) -> Any:
        obs, rewards, _, cut, _ = super().step(actions)
        return obs, rewards, np.full(self.num_envs, self._n == 3), cut, self._own if self._n == 3 else {}


@pytest.mark.parametrize(
    "finals",
    [
        {"final_obs": np.ones((1, 1), np.float32)},
        {"final_obs": 1.0},
        {"final_obs": np.ones((2, 1), np.float32), "_final_obs": np.array([True, False])},
        {"final_obs": np.ones((2, 1), np.float32), "_final_obs": np.array([True])},
    ],
    ids=["a row for one env", "no rows", "one env not marked", "short mask"],
)
def test_last_observations_without_a_row_for_each_env_are_the_vectors_failure(finals: dict[str, Any]) -> None:
    config = EnvRunnerConfig(
        env=lambda c: Spoilt(c.num_envs, finals), num_envs=2, seed=0, restart_failed_sub_environments=False
    )
    with (
        SingleAgentEnvRunner(config) as runner,
        pytest.raises(EnvContractError, match=r"infos\['final_obs'\] should be a row for each of 2 envs"),
    ):
        runner.sample(num_timesteps=8)


def _pool(told: Any = None, **settings: Any) -> Any:
    """A pool of four envs, of which the two that were sent first answer. It counts each env's steps in its infos.

    told: its "env_id" where that is not the truth.
    """

    class Pool(Native):
        def __init__(self) -> None:
            super().__init__(4)
            self.config = {"batch_size": 2}
            self._sent: list[int] = []
            self._steps = np.zeros(4, int)

        def send(self, actions: Any, lanes: Any) -> None:
            self._steps[lanes] += 1
            self._sent += lanes.tolist()

        def _reset(self, lanes: Any) -> None:
            self._steps[lanes] = 0
            self._sent += lanes.tolist()

        def recv(self) -> Any:
            lanes, self._sent = np.array(self._sent[1::-1]), self._sent[2:]
            steps = self._steps[lanes]
            infos = {
                "env_id": lanes if told is None else told,
                "at": np.stack([lanes, steps], 1),
                "players": {"env_id": lanes},
                "all": self._steps,
            }
            return steps[:, None].astype(np.float32), np.ones(2), steps == 5, np.zeros(2, bool), infos

    Pool.__module__ = "envpool.toy"
    return EnvRunnerConfig(env=lambda c: Pool(), num_envs=4, seed=0, **settings)


def test_infos_of_a_pool_that_answers_for_some_envs_are_those_of_their_env_and_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with SingleAgentEnvRunner(_pool()) as runner:
        chunks = runner.sample(num_timesteps=60)
    assert {chunk.env_index for chunk in chunks} == {0, 1, 2, 3}
    for chunk in chunks:
        own, steps = chunk.env_index, chunk.obs[:, 0].astype(int).tolist()
        assert [info["at"] for info in chunk.infos] == [[own, step] for step in steps]
        assert {(info["env_id"], info["players"]["env_id"]) for info in chunk.infos} == {(own, own)}
    assert "'all' of the vector" in caplog.text
    with SingleAgentEnvRunner(_pool(infos="none")) as runner:
        assert not any(chunk.infos for chunk in runner.sample(num_timesteps=60))


@pytest.mark.parametrize("told", ["no", np.array([1, 1]), np.array([2, 4]), np.array([-1, 0]), np.array([0]), 3])
def test_a_pool_that_does_not_name_its_envs_has_failed(told: Any) -> None:
    config = _pool(told, restart_failed_sub_environments=False)
    with SingleAgentEnvRunner(config) as runner, pytest.raises(EnvContractError, match=r"infos\['env_id'\].*each once"):
        runner.sample(num_timesteps=8)


def _in_rows(value: Any, at: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_rows(part, at) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_in_rows(part, at) for part in value)
    return [value[row] for row in at] if isinstance(value, list) else value[at]


class Shuffled(gym.vector.VectorEnv[Any, Any, Any]):
    """Answers for its envs in another order each time. Env i counts from 100 i. Rewards and infos are its counts."""

    single_observation_space = gym.spaces.Dict({"a": BOX, "b": gym.spaces.Tuple((BOX, BOX))})
    single_action_space = TWO

    def __init__(self, mode: AutoresetMode, as_list: bool) -> None:
        self.num_envs, self.metadata, self._as_list = 3, {"autoreset_mode": mode}, as_list
        self._random = np.random.default_rng(0)
        self._over = np.zeros(3, bool)

    def _answer(self, **infos: Any) -> Any:
        at = self._random.permutation(3)
        rows = self._n[at].astype(np.float32)[:, None]
        told = {"n": self._n, "deep": {"n": self._n, "_n": np.ones(3, bool)}, "words": [*map(str, self._n)], **infos}
        told = _in_rows(told, at) | {"env_id": at.tolist() if self._as_list else at}
        return at, {"a": rows, "b": (rows + 0.25, rows + 0.5)}, told

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask", np.ones(3, bool))
        self._n = np.where(mask, 100 * np.arange(3), self._n if options else 0)
        self._over &= ~mask
        return self._answer()[1:]

    def step(self, actions: Any) -> Any:
        mode, first = self.metadata["autoreset_mode"], 100 * np.arange(3)
        begins = self._over if mode is AutoresetMode.NEXT_STEP else np.zeros(3, bool)
        self._n = np.where(begins, first, self._n + 1)
        ends = ~begins & (self._n - first >= 4 + np.arange(3))
        rewards, self._over, finals = self._n.astype(float), ends, {}
        if mode is AutoresetMode.SAME_STEP:
            last = self._n.astype(np.float32)[:, None]
            finals = {"final_obs": {"a": last, "b": (last + 0.25, last + 0.5)}, "_final_obs": ends}
            finals["final_info"] = {"n": self._n, "words": [*map(str, self._n)]}
            self._n = np.where(ends, first, self._n)
        at, seen, told = self._answer(**finals)
        return seen, rewards[at], ends[at] & (at != 1), ends[at] & (at == 1), told


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_rows_in_another_order_belong_to_the_envs_that_env_id_names(mode: AutoresetMode, as_list: bool) -> None:
    with SingleAgentEnvRunner(EnvRunnerConfig(env=lambda c: Shuffled(mode, as_list), num_envs=3, seed=0)) as runner:
        chunks = [chunk for _ in range(4) for chunk in runner.sample(num_timesteps=30)]
        assert runner.totals.env_failures == 0
    assert {chunk.env_index for chunk in chunks} == {0, 1, 2}
    for chunk in chunks:
        counts = np.arange(len(chunk) + 1) + 100 * chunk.env_index + chunk.t_start
        assert chunk.obs["a"][:, 0].tolist() == counts.tolist()
        assert [part[:, 0].tolist() for part in chunk.obs["b"]] == [(counts + 0.25).tolist(), (counts + 0.5).tolist()]
        assert chunk.rewards.tolist() == counts[1:].tolist()
        assert [(info["n"], info["words"]) for info in chunk.infos] == [(n, str(n)) for n in counts]
        length = 4 + chunk.env_index
        assert (chunk.end is not ChunkEnd.ONGOING) == (chunk.t_start + len(chunk) == length)
        assert chunk.end is not (ChunkEnd.TERMINATED if chunk.env_index == 1 else ChunkEnd.TRUNCATED)


class Pair(MultiAgentEnv):
    possible_agents = ("a", "b")
    observation_spaces, action_spaces = dict.fromkeys("ab", BOX), dict.fromkeys("ab", TWO)

    def __init__(self) -> None:
        self._boards = {"a": Board(), "b": Board()}

    def _tell(self) -> Any:
        seen = {agent: np.array([self._n], np.float32) for agent in "ab"}
        return seen, {agent: board.tell(self._n) for agent, board in self._boards.items()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._n = 0
        return self._tell()

    def step(self, actions: Any) -> Any:
        self._n += 1
        seen, infos = self._tell()
        return seen, dict.fromkeys("ab", 1.0), {"__all__": self._n == 3}, {"__all__": False}, infos


def test_infos_of_several_agents_are_those_of_their_step() -> None:
    with MultiAgentEnvRunner(
        EnvRunnerConfig(env=Pair, num_envs=2, seed=0, policies={"p"}, policy_mapping_fn=lambda agent, episode: "p")
    ) as runner:
        chunks = runner.sample(num_timesteps=10)
    assert chunks
    for chunk in chunks:
        assert [numbers(info) for info in chunk.infos] == [{int(n)} for n in chunk.obs[:, 0]]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if levels % 2 else [value]
    return value


@dataclass
class Pose:
    """A value that an env may tell: a dataclass, which JSON holds as an object."""

    speed: float = 1.0
    at: Any = None


class Mode(Enum):
    UNKNOWN = math.nan
    FAST = 2.0


class Sealed:
    """Shows nothing of itself."""

    def __repr__(self) -> str:
        raise RuntimeError("sealed")

    def tolist(self) -> Any:
        raise RuntimeError("sealed")


def copies_itself() -> dict[str, Any]:
    cycle: dict[str, Any] = {"n": 1}
    cycle["a"] = [cycle, cycle]
    return cycle


def json_of(info: dict[str, Any]) -> Any:
    return orjson.loads(info_json(info))


def refuse(left_out: Any) -> None:
    raise AssertionError(left_out)


Pair2 = namedtuple("Pair2", "a b")
ODD: list[tuple[Any, Any]] = [
    (math.nan, math.nan), (np.float32(np.inf), math.inf), (np.array([0.0, np.nan]), [0.0, math.nan]),
    ([1, {"a": -math.inf}, None], [1, {"a": -math.inf}, None]), (np.array([None, math.nan], object), [None, math.nan]),
    (Pose(math.nan), {"speed": math.nan, "at": None}), (Mode.UNKNOWN, math.nan),
    (Pose(at=np.array([math.inf])), {"speed": 1.0, "at": [math.inf]}),
    ({"a": math.nan, "b": "\0nan", "c": "\0", "d": "null"}, {"a": math.nan, "b": "\0nan", "c": "\0", "d": "null"}),
    (torch.tensor([1.0, math.nan], requires_grad=True), [1.0, math.nan]), (torch.tensor(3), 3),
    (torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]), (np.ones(2, ">f4"), [1.0, 1.0]), (np.longdouble(0.5), 0.5),
    (np.full(2, 0.5, np.longdouble), [0.5, 0.5]), ({2, 1}, [1, 2]), (frozenset(), []), (Path("/a/b"), "/a/b"),
    (b"x\xff", "x\\xff"),
    (bytearray(b"x"), "x"), (np.array([b"x"]), ["x"]), (2**64, str(2**64)), (-(2**63) - 1, str(-(2**63) - 1)),
    ("\ud800", "\\ud800"), ("a\0b", "a\0b"), (np.array(["a", "\ud800"]), ["a", "\\ud800"]), (Pair2(1, 2), [1, 2]),
    (deque([1]), [1]), (range(2), [0, 1]), (np.zeros(1, "i4,f4"), [[0, 0.0]]), (MappingProxyType({"a": 1}), {"a": 1}),
    ({(1, 2): 3, math.nan: 4, np.int64(5): 6, "\ud800": 7}, {"(1, 2)": 3, "nan": 4, "5": 6, "\\ud800": 7}),
    (np.array(["2020", "NaT"], "M8[s]"), ["2020-01-01T00:00:00", None]), (datetime(2020, 1, 1), "2020-01-01T00:00:00"),
]  # fmt: skip


def plain(value: Any) -> str:
    """Text of a value in which NaN equals NaN, and arrays and tuples are lists."""
    return repr(value) if isinstance(value, str) else repr(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(("value", "due"), ODD, ids=lambda value: type(value).__name__)
def test_odd_values_of_an_info_are_carried(value: Any, due: Any) -> None:
    info = {"n": 1, "deep": {"odd": [value]}}
    due = {"n": 1, "deep": {"odd": [due]}}
    own, left_out = own_info(refuse, info), list[str]()
    for read in (own, heard_info(left_out.extend, orjson.loads(told_info(info))), read_info(json_of(own))):
        assert plain(read) == plain(due)
    assert not left_out


@pytest.mark.parametrize(
    ("value", "due"),
    [
        (object(), {}), (1j, {}), (np.zeros(2, complex), {}), (lambda: 1, {}), (Sealed(), {}),
        (nested(INFO_DEPTH), None), (nested(300), None),
        (copies_itself(), {"value": {"n": 1, "a": [None, None]}}), ([1, object(), 3], {"value": [1, None, 3]}),
        ({1: "a", "1": "b"}, {"value": {"1": "a"}}), ({None: 1, "null": 2}, {"value": {"null": 1}}),
        (Pose(at=object()), {"value": {"speed": 1.0}}), (np.array([1, object()], object), {"value": [1, None]}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_json_cannot_hold_is_left_out_alone(value: Any, due: Any) -> None:
    info = {"n": math.nan, "value": value}
    own_left_out, left_out = list[str](), list[str]()
    own = own_info(own_left_out.extend, info)
    assert due is None or plain(own) == plain({"n": math.nan, **due})
    assert plain(heard_info(left_out.extend, orjson.loads(told_info(info)))) == plain(own)
    assert left_out == own_left_out
    assert all(name.startswith("info['value']") for name in left_out)
    assert left_out


def test_what_is_left_out_is_named_with_its_place_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    totals = RunnerTotals()
    for _ in range(25):
        assert own_info(totals.note_left_out, {"n": 1, "deep": {"scene": object()}}) == {"n": 1, "deep": {}}
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" (")[0] for line in lines] == ["infos go without info['deep']['scene']"] * 2
    assert [re.findall(r", (\d+) so far", line) for line in lines] == [["1"], ["10"]]
    (group,) = totals.failure_groups.all()
    assert (group.kind, group.where, group.count) == (INFO_LEFT_OUT, "info['deep']['scene']", 25)


def test_many_places_leave_room_for_the_groups_of_failures() -> None:
    totals = RunnerTotals()
    totals.note_left_out([f"info['{n}'] (why)" for n in range(100)])
    groups = totals.failure_groups.all()
    assert sum(group.count for group in groups) == 100
    assert len(groups) <= MOST_GROUPS // 2 + 1
    assert {group.kind for group in groups} == {INFO_LEFT_OUT}


def test_a_reserved_key_is_left_out() -> None:
    assert own_info(refuse, {MARK: [], "n": math.nan, "deep": {MARK: 1}}).keys() == {"n", "deep"}
    left_out: list[str] = []
    assert own_info(left_out.extend, {MARK: 1, "n": 1}) == {"n": 1}
    assert left_out


def test_infos_without_such_numbers_are_the_same_bytes() -> None:
    info = {"a": None, "b": "\0nan", "c": "null", 1: np.arange(2.0), "d": [None, {"e": 1.5}]}
    assert told_info(info) == b'{"a":null,"b":"\\u0000nan","c":"null","1":[0.0,1.0],"d":[null,{"e":1.5}]}'


def test_an_info_that_is_no_dict_is_an_error() -> None:
    with pytest.raises(EnvContractError, match="info should be a dict"):
        told_info([("a", 1)])


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(2**63), 2**64 - 1, 1.5, "null", "é", [], {}, (1, [2]), {1: 2, None: 3}, OrderedDict(a=1),
        np.float32(0.5), np.int8(3), np.bool_(True), np.arange(6).reshape(2, 3).T, np.arange(4)[::2], np.array(3.0),
        np.array(["a", "b"]), np.array([1, "a"], object), np.ones(2, np.float16),
        nested(INFO_DEPTH - 1),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_plain_values_are_sent_as_they_are(value: Any) -> None:
    info = {"value": value}
    own, written = own_info(refuse, info), told_info(info)
    assert (info_json(info), info_json(own)) == (written, written)
    assert own is not info
    assert repr(own) == repr(orjson.loads(written)), "of the same types"


@pytest.mark.parametrize(
    "value",
    [Pose(2.0, [Pose(), Mode.FAST]), Mode.FAST, np.array(["2020-01-01"], "M8[ns]"), np.array(["2020-01-01"], "M8[D]")],
    ids=repr,
)
def test_a_value_that_json_holds_in_other_words_is_the_same_from_processes(value: Any) -> None:
    info = {"value": value, 1: 2}
    assert own_info(refuse, info) == orjson.loads(told_info(info))


LEFT_OUT = [object(), 1j, nested(300), copies_itself(), Sealed(), {1: "a", "1": "b"}]


class Odd(gym.Env[Any, Any]):
    """Tells a number, NaN in the last step of odd episodes, and values of all kinds."""

    observation_space, action_space = BOX, TWO

    def __init__(self, first: int, told: Any = None) -> None:
        self._told = told or [*(value for value, _ in ODD), *LEFT_OUT]
        self._of = self._episode = first

    def _tell(self) -> Any:
        self._of += 1
        kind = self._of % len(self._told)
        goal = math.nan if self._n == 5 and self._episode % 2 else float(self._n)
        return np.array([self._n], np.float32), {"goal": goal, "kind": kind, "odd": self._told[kind]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._n, self._episode = 0, self._episode + 1
        return self._tell()

    def step(self, action: Any) -> Any:
        self._n += 1
        seen, info = self._tell()
        return seen, 1.0, self._n == 5, False, info


class OddPair(MultiAgentEnv):
    possible_agents = ("a",)
    observation_spaces, action_spaces = {"a": BOX}, {"a": TWO}

    def __init__(self, first: int) -> None:
        self._env = Odd(first)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return tuple({"a": part} for part in self._env.reset())

    def step(self, actions: Any) -> Any:
        seen, reward, over, cut, info = self._env.step(0)
        return {"a": seen}, {"a": reward}, {"__all__": over}, {"__all__": cut}, {"a": info}


def make_odd(context: Any) -> Any:
    return Odd(context.vector_index)


def make_odd_pair(context: Any) -> Any:
    return OddPair(context.vector_index)


def make_odd_vector(context: Any) -> Any:
    told = [value for value in LEFT_OUT if type(value) is not dict]  # gymnasium puts them into arrays of objects
    told += [Path("/a"), {1, 2}, b"x", torch.ones(2), Mode.UNKNOWN, Pose(math.nan), "\ud800"]
    return gym.vector.SyncVectorEnv([lambda: Odd(0, told)] * context.num_envs)


def odd_chunks(make: str, steps: int, **settings: Any) -> list[Any]:
    config = EnvRunnerConfig(env=f"test_told_infos:{make}", num_envs=4, seed=0, **settings)
    runner: Any
    if make == "make_odd_pair":
        settings = {"policies": {"p"}, "policy_mapping_fn": lambda agent, episode: "p"}
        runner = MultiAgentEnvRunner(config.model_copy(update=settings))
    else:
        runner = SingleAgentEnvRunner(config)
    with runner:
        chunks = [chunk for _ in range(steps // 400) for chunk in runner.sample(num_timesteps=400)]
        assert (runner.totals.env_failures, runner.totals.discarded) == (0, {})
    assert sum(map(len, chunks)) >= steps
    return chunks


@pytest.mark.parametrize(
    ("make", "placement", "steps"),
    [
        ("make_odd", "inline", 4000),
        ("make_odd", "process", 4000),
        ("make_odd_pair", "inline", 2000),
        ("make_odd_pair", "process", 2000),
        ("make_odd_vector", "inline", 2000),
        pytest.param("make_odd", "process", 200_000, marks=pytest.mark.thorough),
    ],
)
def test_no_info_costs_a_step(make: Any, placement: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    due = [value for _, value in ODD]
    for chunk in odd_chunks(make, steps, env_placement=placement):
        assert len(chunk.infos) == len(chunk) + 1
        for info, n in zip(chunk.infos, chunk.obs[:, 0].tolist(), strict=True):
            assert info["goal"] == n or (n == 5 and math.isnan(info["goal"]))
            if info["kind"] < len(due) and make != "make_odd_vector":
                assert plain(info["odd"]) == plain(due[info["kind"]])


class Turns(AECEnv[Any, Any, Any]):
    """Two agents in turns. The last info of each has what cannot be copied, and an array that the next turn changes."""

    metadata = MappingProxyType({"name": "turns"})  # type: ignore[assignment]

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]
        self._at = np.zeros(1)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.agent_selection, self._n = ["a", "b"], "a", 0

    def observation_space(self, agent: str) -> Any:
        return BOX

    def action_space(self, agent: str) -> Any:
        return TWO

    def observe(self, agent: str) -> Any:
        return np.zeros(1, np.float32)

    def last(self, observe: bool = True) -> Any:
        self._at[:] = self._n
        info = {"lock": threading.Lock(), "at": self._at, "n": self._n}
        return self.observe(""), 1.0, self._n >= 4, False, info

    def step(self, action: Any) -> None:
        self._n += 1
        if self._n > 4:
            self.agents = self.agents[1:]
        self.agent_selection = "ab"[self._n % 2] if self._n <= 4 else (self.agents or ["a"])[0]


def make_turns(context: Any) -> Any:
    return Turns()


@pytest.mark.parametrize("placement", ["inline", "process"])
def test_an_info_that_cannot_be_copied_costs_no_turn(placement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    policies: Any = {"policies": {"p"}, "policy_mapping_fn": lambda agent, episode: "p"}
    config = EnvRunnerConfig(env="test_told_infos:make_turns", seed=0, env_placement=placement, **policies)
    with MultiAgentEnvRunner(config) as runner:
        chunks = runner.sample(num_episodes=3)
        assert (runner.totals.env_failures, runner.totals.discarded) == (0, {})
        places = [group.where for group in runner.totals.failure_groups.all()]
    assert places
    assert all(place.endswith("['lock']") for place in places)
    infos = [info for chunk in chunks for info in chunk.infos if info]
    assert infos
    assert all(info == {"at": [info["n"]], "n": info["n"]} for info in infos)


@pytest.mark.parametrize("calls", [1, 2000])
def test_no_count_is_lost_where_ports_note_in_threads_of_their_own(calls: int) -> None:
    totals, switching = RunnerTotals(), sys.getswitchinterval()

    def note() -> None:
        for _ in range(calls):
            totals.note_outside("env", 1, {"obs": (2.0, 1.0)})
            totals.note_left_out(["info['a'] (why)"])

    threads = [threading.Thread(target=note) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switching)
    assert totals.observations_outside == 4 * calls
    assert [group.count for group in totals.failure_groups.all()] == [4 * calls]


class Masked(Moves):
    """Tells the only legal action, or one that is none, beside what nobody can carry."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self._mask, self.acted = mask, []

    def reset(self, **_: Any) -> Any:
        return super().reset()[0], {"action_mask": self._mask, "scene": object()}

    def step(self, action: Any) -> Any:
        assert action == 1 or not isinstance(self._mask, np.ndarray)
        *seen, _ = super().step(action)
        return *seen, {"action_mask": self._mask, "scene": object()}


def make_masked(context: Any) -> Any:
    return Masked(object() if context.get("bad") else np.array([0, 1]))


@pytest.mark.parametrize("infos", ["all", "none"])
@pytest.mark.parametrize("placement", ["inline", "process"])
def test_a_mask_binds_or_is_an_error_and_other_infos_are_not_looked_at(
    placement: Any, infos: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = EnvRunnerConfig(
        env="test_told_infos:make_masked", seed=0, env_placement=placement, infos=infos, env_restart_attempts=1
    )
    with SingleAgentEnvRunner(config) as runner:
        (chunk, *_) = runner.sample(num_timesteps=50, random_actions=True)
        assert runner.totals.env_failures == 0
        places = [group.where for group in runner.totals.failure_groups.all()]
        assert places == (["info['scene']"] if infos == "all" else [])
        assert bool(chunk.infos) == (infos == "all")
    assert ("'scene'" in caplog.text) == (infos == "all")
    bad = config.model_copy(update={"env_config": {"bad": True}})
    with SingleAgentEnvRunner(bad) as runner, pytest.raises(HeadraceError, match=r"info\['action_mask'\] should be"):
        runner.sample(num_timesteps=50, random_actions=True)
