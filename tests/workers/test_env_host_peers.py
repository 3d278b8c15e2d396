"""Env hosts as their worker sees them: their answers, the rest of those whose envs only fail, and large infos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, decode
from headrace.workers import EnvRunnerConfig
from headrace.workers.envs.backend import Replies
from headrace.workers.envs.process.control import NO_SEED, Command
from headrace.workers.envs.remote.env_messages import EnvAnswers, EnvHostHello
from headrace.workers.envs.remote.host.process import learn_spaces
from headrace.workers.envs.remote.host_places import HostPlaces
from headrace.workers.envs.remote.order_frames import RemoteColumns, take_replies
from headrace.workers.envs.remote.peer import EnvHostPeer

SPACES = learn_spaces(EnvRunnerConfig(env="CartPole-v1", num_envs=1))
RAISED = {"is": "raised", "kind": "ValueError", "message": "diverged", "trace": ""}


def a_host(life: str = "life", num_envs: int = 2, **told: Any) -> EnvHostPeer:
    return EnvHostPeer(EnvHostHello(life=life, num_envs=num_envs, spaces={}, **told), b"route", 0.0)


def answered(command: Command, told: Mapping[str, Any]) -> Replies:
    """The worker's reading of an answer to this order of place 0, whose lane is 1. Lane 0 is that of place 1."""
    host, columns, replies = a_host(), RemoteColumns(SPACES, 2), Replies()
    host.lanes[:] = [1, 0]
    host.ask(0, command, NO_SEED)
    host.take_due(0.0)
    answers = EnvAnswers(life="life", answers=[(0, 1)], **told)
    arrays: dict[str, Any] = {}
    if answers.stepped:
        arrays = {"rewards": np.ones(len(answers.stepped)), "obs": np.zeros((len(answers.stepped), 4), np.float32)}
    if answers.began:
        arrays["first"] = np.zeros((len(answers.began), 4), np.float32)
    take_replies(host, answers, arrays, columns, replies)
    return replies


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (Command.STEP, {"stepped": [0]}),
        (Command.STEP, {"stepped": [0], "ended": [(0, 1)], "began": [(0, {"a": 1})], "infos": [(0, {"b": 2})]}),
        (Command.STEP, {"stepped": [0], "ended": [(0, 2)], "failures": [(0, "reset", False, RAISED)]}),
        (Command.STEP, {"failures": [(0, "step", True, RAISED)]}),
        (Command.RESET, {"began": [(0, None)]}),
        (Command.RESET, {"failures": [(0, "reset", False, RAISED)]}),
        (Command.BUILD, {"built": [0]}),
    ],
)
def test_the_answers_of_an_honest_host_are_taken(command: Command, told: dict[str, Any]) -> None:
    replies = answered(command, told)
    assert replies.stepped == [1] * len(told.get("stepped", ()))
    assert [failure.lane for failure in replies.failures] == [1] * len(told.get("failures", ()))


@pytest.mark.parametrize(("ended", "lanes"), [([(0, 1)], [1]), ([(0, 2)], []), ([], [])])
def test_only_an_episode_that_a_host_calls_terminated_is_truncated_too(ended: Any, lanes: list[int]) -> None:
    assert answered(Command.STEP, {"stepped": [0], "ended": ended, "also_truncated": [0]}).also_truncated == lanes


def two_hosts(bad_places: int = 2) -> HostPlaces:
    """Lanes 0 and 1 on the host "bad", the others on "good", whose envs have stepped."""
    places = HostPlaces(bad_places + 1, lambda lane, again: NO_SEED)
    for life, num_envs in (("bad", bad_places), ("good", 4)):
        places.hosts[life] = a_host(life, num_envs, host=life)
    places.settle_in(0.0)
    places.hosts["good"].has_stepped = True
    return places


def test_a_host_whose_envs_only_fail_gets_none_for_a_growing_time_while_another_works() -> None:
    places = two_hosts()
    assert places.refuse(0, {0, 1}, "no licence", 0.0)
    assert places.refuse(1, {0, 1}, "no licence", 0.0), "its host was parted from already"
    assert places.bury() == [], "both lanes have failed already"
    for rests_until, again_at in ((10.0, 10.0), (30.0, 10.0)):
        places.hosts["bad"] = a_host("bad", 2, host="bad")
        for host in places.hosts.values():
            host.lanes = [lane if lane is not None else 9 for lane in host.lanes] if host.life == "good" else host.lanes
        places.restart(0)
        places.settle_in(rests_until - 0.1)
        assert not places.hosts["bad"].taken()
        places.settle_in(rests_until)
        assert places.hosts["bad"].taken() == [0]
        assert places.refuse(0, {0, 1}, "no licence", again_at)


@pytest.mark.parametrize(("failing", "has_stepped"), [({0, 1, 2}, True), ({0}, True), ({0, 1}, False)])
def test_a_host_is_kept_where_no_other_works_or_one_of_its_own_envs_does(failing: set[int], has_stepped: bool) -> None:
    places = two_hosts()
    places.hosts["good"].has_stepped = has_stepped
    assert not places.refuse(0, failing, "diverged", 0.0)
    assert places.hosts.keys() == {"bad", "good"}


def test_a_host_that_rests_is_used_where_no_other_is_left() -> None:
    places = two_hosts()
    assert places.refuse(0, {0, 1}, "no licence", 0.0)
    places.part(places.hosts["good"], "has left")
    places.bury()
    places.hosts["bad"] = a_host("bad", 2, host="bad")
    places.restart(0)
    places.settle_in(1.0)
    assert places.hosts["bad"].taken() == [0]


def test_infos_of_one_message_have_8192_names_at_most_in_one_object() -> None:
    """An honest host fails its env instead (`test_hosted_envs.py`)."""
    names = DEFAULT_LIMITS.names

    def told(count: int) -> list[Any]:
        info = {f"k{number}": 1 for number in range(count)}
        return [bytes(part) for part in EnvAnswers(life="life", answers=[(0, 1)], infos=[(0, info)]).frames()]

    assert names == 8192
    assert len(decode(told(names)).header["infos"][0][1]) == names
    with pytest.raises(DecodeError):
        decode(told(names + 1))
