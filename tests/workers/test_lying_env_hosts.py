"""Env hosts that lie in their answers and heartbeats: they harm no env of other hosts, and not the worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zmq

from headrace.schemas.basics.bounds import MOST_BYTES, MOST_SECONDS
from headrace.schemas.errors import DecodeError, EnvError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, MessageKind, decode, encode
from headrace.schemas.messages import Heartbeat
from headrace.schemas.peers import peer_account
from headrace.workers import EnvRunnerConfig
from headrace.workers.envs.backend import Replies
from headrace.workers.envs.process.control import NO_SEED, Command
from headrace.workers.envs.remote.env_messages import EnvAnswers, EnvHeartbeat, EnvHostHello
from headrace.workers.envs.remote.host.process import learn_spaces
from headrace.workers.envs.remote.host_places import HostPlaces
from headrace.workers.envs.remote.order_frames import RemoteColumns, take_replies
from headrace.workers.envs.remote.peer import EnvHostPeer
from headrace.workers.envs.remote.pool import RemotePool
from headrace.workers.envs.remote.router_port import RouterPort
from support.raw_zmtp import RawZmtp, on_the_wire
from support.waiting import wait_until

SPACES = learn_spaces(EnvRunnerConfig(env="CartPole-v1", num_envs=1))
TOTALS = {"env_steps": 0, "agent_steps": 0}
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
    ("command", "told", "sentence"),
    [
        (Command.STEP, {}, "without 'stepped' of place 0"),
        (Command.RESET, {}, "without 'began' of place 0"),
        (Command.BUILD, {}, "without 'built' of place 0"),
        (Command.REBUILD, {"stepped": [0]}, "without 'built' of place 0"),
        (Command.STEP, {"stepped": [0, 0]}, "'stepped' of a place more than once"),
        (Command.STEP, {"stepped": [0], "ended": [(0, 1), (0, 2)]}, "'ended' of a place more than once"),
        (Command.STEP, {"stepped": [0], "infos": [(0, {}), (0, {})]}, "'infos' of a place more than once"),
        (Command.RESET, {"began": [(0, {}), (0, {})]}, "'began' of a place more than once"),
        (Command.STEP, {"stepped": [0], "built": [0]}, "with 'built' of place 0, which was not ordered"),
        (Command.STEP, {"stepped": [0], "began": [(0, {})]}, "with 'began' of place 0, which was not ordered"),
        (Command.RESET, {"began": [(0, {})], "ended": [(0, 1)]}, "with 'ended' of place 0, which was not ordered"),
        (Command.BUILD, {"built": [0], "stepped": [0]}, "with 'stepped' of place 0, which was not ordered"),
        (Command.STEP, {"failures": [(0, "step", False, {**RAISED, "kind": 1})]}, "a failure that tells no error"),
        (Command.STEP, {"failures": [(0, "step", False, {**RAISED, "message": []})]}, "a failure that tells no error"),
        (Command.STEP, {"failures": [(0, "step", False, {"is": []})]}, "a failure that tells no error"),
    ],
)
def test_an_answer_without_the_ordered_result_or_with_another_is_refused(
    command: Command, told: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DecodeError, match=sentence):
        answered(command, told)


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


def test_a_failure_told_many_times_counts_once_and_long_texts_are_cut() -> None:
    """Each would count as a failure of its env, and nine in a row end a worker."""
    long = {**RAISED, "message": "m" * 500_000}
    (failure,) = answered(Command.STEP, {"failures": [(0, "step" * 1000, False, long)] * 50}).failures
    assert isinstance(failure.error, EnvError)
    assert len(str(failure.error)) < 30_000
    assert len(failure.at) <= 100


def test_claims_of_use_by_many_hosts_fit_in_the_workers_heartbeat() -> None:
    """A heartbeat that breaks its own bounds ended the worker."""
    places = HostPlaces(2, lambda lane, again: NO_SEED)
    for life in ("a", "b"):
        places.hosts[life] = a_host(life)
        for told in ((0.0, 0), (MOST_SECONDS, MOST_BYTES)):
            places.hosts[life].note_usage(told)
    assert places.usage == (MOST_SECONDS, MOST_BYTES)
    places.part(places.hosts["a"], "has left")
    assert places.usage == (MOST_SECONDS, MOST_BYTES)
    assert Heartbeat(slot=0, incarnation=1, totals=TOTALS, envs_usage=places.usage).envs_usage is not None  # type: ignore[arg-type]


def test_lives_without_a_connection_keep_no_host_out_and_take_little_memory() -> None:
    places = HostPlaces(2, lambda lane, again: NO_SEED)
    for number in range(1100):
        assert places.make_room(1) == ""
        life = f"life-{number}"
        places.hosts[life] = a_host(life, 1, host="h" * 100_000, env="e" * 100_000)
        places.hosts[life].heard_at = float(number)
        places.settle_in(0.0)
    assert len(places.hosts) <= 1024
    assert {"life-0", "life-1", "life-1099"} <= places.hosts.keys(), "those with envs, and the newest"
    assert "life-2" not in places.hosts
    assert len(places.hosts["life-1099"].name) < 1000
    assert "places are taken" in places.make_room(1 << 17)


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
        assert places.hosts["bad"].is_spare
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


@contextmanager
def a_pool() -> Iterator[RemotePool]:
    """The driver of one env at a port for env hosts, and an honest host of a spare env beside it."""
    port, stopping = RouterPort("127.0.0.1", 0, None), threading.Event()

    def host() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
            sock.linger = 0
            sock.connect(port.endpoint)
            sock.send_multipart(EnvHostHello(life="honest", num_envs=1, spaces=SPACES.model_dump(mode="json")).frames())
            while not stopping.is_set():
                if sock.poll(20) and "orders" in (header := decode(sock.recv_multipart()).header):
                    answers = [(place, number) for place, number, *_ in header["orders"]]
                    sock.send_multipart(EnvAnswers(life="honest", answers=answers, built=[0]).frames())

    thread = threading.Thread(target=host)
    thread.start()
    config = EnvRunnerConfig(env="CartPole-v1", num_envs=1, env_placement="remote", env_hosts_port=1)
    try:
        pool = RemotePool(config, 0, lambda lane, again: NO_SEED, port, lambda spaces: "")
        yield pool
        pool.close()
    finally:
        stopping.set()
        thread.join()


@pytest.mark.parametrize(
    "lie",
    [
        EnvHeartbeat(life="liar").frames(),
        EnvHostHello(life="liar", num_envs=1, spaces=SPACES.model_dump(mode="json")).frames(),
        EnvAnswers(life="liar", answers=[(0, 9)]).frames(),
        encode(MessageKind.HEARTBEAT, {"life": "liar", "later": "x" * (900 << 10)}),
        [b"garbage"],
    ],
    ids=["heartbeats", "HELLOs", "answers to no order", "large heartbeats", "garbage"],
)
def test_a_known_host_that_floods_the_port_is_cut_and_the_other_stays(
    lie: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The port drops the rest unread. If it read a message without its later frames, it would log a refusal."""
    monkeypatch.setattr(peer_account, "KNOWN_PER_S", 0.0)
    monkeypatch.setattr(peer_account, "REFUSED_PER_S", 0.0)
    hello = EnvHostHello(life="liar", num_envs=1, spaces=SPACES.model_dump(mode="json"))
    with a_pool() as pool, RawZmtp(pool.endpoint) as liar:
        liar.send(on_the_wire(hello.frames()))
        wait_until(lambda: pool.step_wait(0.02) is not None and len(pool.hosts) == 2, "the liar to join")
        flood = on_the_wire(lie)
        for _ in range(10 if len(flood) > 1 << 19 else 1100):
            liar.send(flood)
        wait_until(lambda: pool.step_wait(0.02) is not None and liar.is_cut(), "the liar to be cut")
        wait_until(
            lambda: pool.step_wait(0.02) is not None and not pool._router_port.wait(0.0), "the rest to be dropped"
        )
        assert len(pool.hosts) == 2, "its life ends later, by its lease"
    refused = [record for record in caplog.records if "is refused" in record.getMessage()]
    assert bool(refused) == (lie == [b"garbage"])


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
