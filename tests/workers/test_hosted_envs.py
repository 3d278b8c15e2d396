"""The envs of an env host: a retried order is not obeyed twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.info_json import MARK
from headrace.schemas.frames.wire import WireMessage, decode
from headrace.workers import EnvRunnerConfig
from headrace.workers.envs.process.control import Command
from headrace.workers.envs.remote.env_messages import NO_SEED, EnvHostWelcome, EnvOrders
from headrace.workers.envs.remote.host.hosted import HostedEnvs
from headrace.workers.envs.remote.host.process import learn_spaces
from support.runners.closing import close_within
from support.waiting import wait_until

pytestmark = pytest.mark.processes

LEFT = {"actions": np.zeros(1, np.int64)}


@pytest.fixture
def envs() -> Iterator[HostedEnvs]:
    config = EnvRunnerConfig(env="CartPole-v1", num_envs=2, envs_per_process=2, env_placement="process")
    welcome = EnvHostWelcome(worker_index=0, num_workers=1, num_envs=2, lease_s=10.0, heartbeat_interval_s=1.0)
    hosted = HostedEnvs(config, "life", welcome, learn_spaces(config))
    yield hosted
    hosted.stop()


def orders(*rows: tuple[int, int, Command, int]) -> EnvOrders:
    listed: list[Any] = [(place, number, int(command), seed, place) for place, number, command, seed in rows]
    return EnvOrders(life="life", orders=listed)


def answer(envs: HostedEnvs) -> WireMessage:
    found: list[Any] = []
    wait_until(lambda: found.append(envs.poll()) or found[-1], what="an answer")
    (message,) = found[-1]
    return decode(message)


def test_a_repeated_order_gets_the_same_answer_and_is_not_obeyed_twice(envs: HostedEnvs) -> None:
    build = orders((0, 1, Command.BUILD, NO_SEED))
    assert envs.obey(build, {}) == []
    assert envs.under_way() == [(0, 1)]
    assert envs.obey(build, {}) == [], "it is under way"
    assert answer(envs).header["built"] == [0]
    envs.obey(orders((0, 2, Command.RESET, 7)), {})
    began = answer(envs)
    envs.obey(orders((0, 3, Command.STEP, NO_SEED)), LEFT)
    stepped = answer(envs)
    assert (stepped.header["answers"], stepped.header["stepped"], envs.under_way()) == ([[0, 3]], [0], [])
    assert not np.array_equal(stepped.arrays["obs"], began.arrays["first"])
    (again,) = envs.obey(orders((0, 3, Command.STEP, NO_SEED)), LEFT)
    assert decode(again).header == stepped.header
    assert decode(again).arrays["obs"].tobytes() == stepped.arrays["obs"].tobytes()
    assert envs.obey(orders((0, 2, Command.RESET, 7)), {}) == [], "what is older than the newest is over"


def test_each_place_takes_the_step_with_its_own_row_of_the_actions() -> None:
    config = EnvRunnerConfig(env="CartPole-v1", num_envs=3, envs_per_process=3, env_placement="process")
    welcome = EnvHostWelcome(worker_index=0, num_workers=1, num_envs=3, lease_s=10.0, heartbeat_interval_s=1.0)
    hosted = HostedEnvs(config, "life", welcome, learn_spaces(config))
    try:
        for number, (command, seed) in enumerate([(Command.BUILD, NO_SEED), (Command.RESET, 7)], start=1):
            hosted.obey(orders(*((place, number, command, seed) for place in range(3))), {})
            wait_until(lambda: hosted.poll() and not hosted.under_way(), what="the answers of all places")
        steps = orders(*((place, 3, Command.STEP, NO_SEED) for place in range(3)))
        hosted.obey(steps, {"actions": np.array([0, 0, 1])})
        wait_until(lambda: hosted.poll() is not None and not hosted.under_way(), what="three steps")
        (again,) = hosted.obey(steps, {"actions": np.array([0, 0, 1])})
    finally:
        hosted.stop()
    velocity = decode(again).arrays["obs"][:, 1]
    assert velocity[0] == velocity[1] < velocity[2]


def test_an_answer_too_large_for_a_message_goes_without_its_info() -> None:
    config = EnvRunnerConfig(env="support.envs.troubled:Wordy", num_envs=2, envs_per_process=2, env_placement="process")
    welcome = EnvHostWelcome(worker_index=0, num_workers=1, num_envs=2, lease_s=10.0, heartbeat_interval_s=1.0)
    hosted = HostedEnvs(config, "life", welcome, learn_spaces(config))
    try:
        for number, command in enumerate((Command.BUILD, Command.RESET), start=1):
            hosted.obey(orders((0, number, command, 7), (1, number, command, 7)), {})
            answer(hosted)
        hosted.obey(orders((0, 3, Command.STEP, 7), (1, 3, Command.STEP, 7)), {"actions": np.array([2, 1])})
        found: list[Any] = []
        wait_until(lambda: found.extend(hosted.poll()) or len(found) == 2, what="both answers")
        wordy, other = (decode(message).header for message in found)
    finally:
        hosted.stop()
    ((place, info),) = wordy["infos"]
    assert (place, info.keys(), wordy["stepped"], wordy["failures"]) == (0, {MARK}, [0], [])
    assert (other["stepped"], other["failures"]) == ([1], [])


@pytest.mark.parametrize(("names", "fails"), [(8192, False), (8193, True)])
def test_an_info_of_more_than_8192_names_is_left_out_but_its_mask(envs: HostedEnvs, names: int, fails: bool) -> None:
    """A worker refuses such a message before it reads the values."""
    place = envs._places[0]
    info = {"deep": {f"k{number}": 1 for number in range(names)}, "action_mask": [1]}
    place.number, place.told = 1, {"began": (0, info)}
    envs._pool.first = {"obs": np.zeros((2, 4), np.float32)}
    (frames,) = envs._compose([0])
    told = decode(frames).header
    ((_, info),) = told["began"]
    assert told["failures"] == []
    assert info.keys() == ({MARK, "action_mask"} if fails else {"deep", "action_mask"})


@pytest.mark.parametrize("without_infos", [False, True])
def test_a_host_tells_masks_alone_to_a_worker_that_wants_no_infos(
    without_infos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = EnvRunnerConfig(env="test_told_infos:make_masked", num_envs=1, env_placement="process")
    numbers = {"worker_index": 0, "num_workers": 1, "num_envs": 1}
    welcome = EnvHostWelcome(**numbers, lease_s=10.0, heartbeat_interval_s=1.0, without_infos=without_infos)
    assert welcome.to_wire().get("without_infos", False) is without_infos
    hosted = HostedEnvs(config, "life", welcome, learn_spaces(config))
    try:
        hosted.obey(orders((0, 1, Command.BUILD, NO_SEED)), {})
        answer(hosted)
        hosted.obey(orders((0, 2, Command.RESET, 7)), {})
        ((_, info),) = answer(hosted).header["began"]
    finally:
        hosted.stop()
    assert info.keys() == ({"action_mask"} if without_infos else {"action_mask", MARK})


def test_an_env_rebuilt_after_a_hung_close_keeps_the_workers_env_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Place 0 of the host holds the worker's env 3, and only env 3 raises in its fifth step."""
    close_within(monkeypatch, 0.5)
    faults = {"lane": 3, "faults": {"step": "raises", "close": "hangs with the lock"}, "again": {"step": "raises"}}
    settings: dict[str, Any] = {"env_config": faults, "env_placement": "process"}
    config = EnvRunnerConfig(env="support.envs.troubled:Troubled", num_envs=1, **settings)
    welcome = EnvHostWelcome(worker_index=0, num_workers=1, num_envs=4, lease_s=10.0, heartbeat_interval_s=1.0)
    hosted = HostedEnvs(config, "life", welcome, learn_spaces(config))
    number = 0

    def obey(command: Command, arrays: dict[str, Any] | None = None) -> dict[str, Any]:
        nonlocal number
        number += 1
        hosted.obey(EnvOrders(life="life", orders=[(0, number, int(command), 7, 3)]), arrays or {})
        return answer(hosted).header

    try:
        for command in (Command.BUILD, Command.REBUILD):
            assert obey(command)["built"] == [0]
            obey(Command.RESET)
            told = [obey(Command.STEP, LEFT)["failures"] for _ in range(5)]
            assert [len(failures) for failures in told] == [0, 0, 0, 0, 1]
            assert told[-1][0][1] == "step"
    finally:
        hosted.stop()


def test_the_codes_of_orders_stay_as_hosts_of_other_versions_read_them() -> None:
    codes = {command.name: command.value for command in Command}
    assert codes == {"NONE": 0, "BUILD": 1, "REBUILD": 2, "RESET": 3, "STEP": 4, "CLOSE": 5, "RENDER": 6}
