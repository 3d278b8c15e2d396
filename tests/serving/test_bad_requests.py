"""A wrong request of a client is refused by name over ZeroMQ and HTTP, and harms no other client."""

from __future__ import annotations

import logging
import random
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import orjson
import pytest
import zmq

from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import EnvContractError, HeadraceError
from headrace.schemas.errors.serving import (
    MessageTooLargeError,
    ServingError,
    error_of,
)
from headrace.schemas.frames.wire import decode, encode
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.serving_messages import (
    ANSWERS,
    ClientHello,
    ClientReject,
    EpisodeAbort,
    EpisodeStart,
    EpisodeStep,
)
from headrace.workers.serving.space_codec import read_each
from support.refusals import refused
from support.serving.plain_episodes import SPACES, rule
from support.serving.served import LIMITS, Served
from support.waiting import TIMEOUT_S


class Way(Protocol):
    """Says one thing as client `token` of session `session`; gives the answer's fields, or raises what it is told."""

    def open(self) -> Any: ...
    def start(self, episode: str, **body: Any) -> Any: ...
    def step(self, episode: str, step: Any, observation: Any, **body: Any) -> Any: ...
    def abort(self, episode: str) -> Any: ...
    def close(self) -> None: ...


class ByZmq:
    def __init__(self, server: Served, token: str, session: str = "s") -> None:
        self._who = {"session": session, "token": token}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(server.endpoint)

    def say(self, frames: Any) -> Any:
        self._socket.send_multipart(frames)
        assert self._socket.poll(100_000), "no answer"
        message = decode(self._socket.recv_multipart())
        assert message.kind in ANSWERS
        if message.kind is ClientReject.KIND:
            header = message.header
            raise error_of(header["error"], header["message"], header["facts"])
        return message.header | {name: array.tolist() for name, array in message.arrays.items()}

    def open(self) -> Any:
        return self.say(ClientHello(**self._who).frames())

    def start(self, episode: str, **body: Any) -> Any:
        return self.say(encode(EpisodeStart.KIND, {**self._who, "episode": episode, **body}))

    def step(self, episode: str, step: Any, observation: Any, **body: Any) -> Any:
        arrays = {"obs": np.asarray(observation, np.float32)}
        if "action" in body:
            arrays["actions"], body["off_policy"] = np.asarray(body.pop("action")), True
        header = {**self._who, "episode": episode, "step": step, **body}
        return self.say(encode(EpisodeStep.KIND, header, arrays))

    def abort(self, episode: str) -> Any:
        return self.say(EpisodeAbort(**self._who, episode=episode).frames())

    def close(self) -> None:
        self._context.destroy(linger=0)


class ByHttp:
    def __init__(self, server: Served, token: str, session: str = "s") -> None:
        self.url, self._path = server.url, f"/v1/sessions/{session}"
        self.headers = {"Headrace-Client": token}

    def say(self, method: str, path: str, body: Any = b"") -> Any:
        data = body if isinstance(body, bytes) else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        request = urllib.request.Request(self.url + path, data, self.headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return orjson.loads(answer.read())
        except urllib.error.HTTPError as refusal:
            told = orjson.loads(refusal.read())
            refusal.close()
            assert set(told) == {"error", "message", "facts"}
            error = error_of(told["error"], told["message"], told["facts"])
            error.add_note(str(refusal.code))
            raise error from None

    def open(self) -> Any:
        return self.say("PUT", self._path)

    def start(self, episode: str, **body: Any) -> Any:
        return self.say("PUT", f"{self._path}/episodes/{episode}", body)

    def step(self, episode: str, step: Any, observation: Any, **body: Any) -> Any:
        return self.say("PUT", f"{self._path}/episodes/{episode}/steps/{step}", {"observation": observation, **body})

    def abort(self, episode: str) -> Any:
        return self.say("DELETE", f"{self._path}/episodes/{episode}")

    def close(self) -> None:
        """Each request had a connection of its own."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    limits = replace(LIMITS, max_sessions=500)  # each test leaves sessions behind, for a lease
    with Served(limits, host="127.0.0.1") as served:
        yield served


@pytest.fixture(params=[ByZmq, ByHttp])
def way(request: pytest.FixtureRequest, shared: Served) -> Iterator[Any]:
    """A session with an episode, which is unharmed at the end: it goes on to its third step."""
    name = f"{request.param.__name__}-{random.getrandbits(40):x}"
    way = request.param(shared, "own-token", name)
    way.open()
    way.start(name)
    way.step(name, 0, [1, 2])
    way.name = name
    yield way
    answer = way.step(name, 1, [2, 2], reward=1.0)
    assert answer.get("action", answer.get("actions")) == rule([2, 2])
    way.step(name, 2, [3, 2], reward=2.0, end="terminated")
    assert shared.episodes.episodes[name].rewards == [0, 1, 2]
    way.close()


def test_an_episode_that_was_never_started_is_unknown(way: Any) -> None:
    with refused("unknown_episode", match="'nobody' was not found"):
        way.step("nobody", 0, [1, 2])
    with refused("unknown_episode"):
        way.abort("nobody")


def test_an_episode_that_has_ended_takes_no_step(way: Any) -> None:
    over = f"{way.name}-over"
    way.start(over)
    way.step(over, 0, [0, 0], end="truncated")
    for step in (1, 7):
        with refused("already_completed", match="has already completed"):
            way.step(over, step, [0, 0])
    with refused("already_completed"):
        way.start(over)


def test_an_episode_that_the_env_gave_up_stays_over_for_its_session(way: Any, shared: Served) -> None:
    given_up = f"{way.name}-given-up"
    way.start(given_up)
    way.step(given_up, 0, [0, 0])
    shared.episodes.episodes[given_up].end = "stalled"
    with refused("aborted", match="was aborted: stalled"):
        way.step(given_up, 1, [0, 0])
    del shared.episodes.episodes[given_up]  # the env forgets it
    with refused("aborted", match="was aborted: .*stalled"):
        way.step(given_up, 1, [0, 0])


def test_an_episode_is_not_started_twice(way: Any, shared: Served) -> None:
    with refused("already_started", match="already started"):
        way.start(way.name)
    elsewhere = type(way)(shared, "t", f"{way.name}-2")
    elsewhere.open()
    with refused("already_started"):
        elsewhere.start(way.name)
    elsewhere.close()


def test_a_step_out_of_order_is_refused(way: Any) -> None:
    with refused("step_order", match="is not the next one, which is 1"):
        way.step(way.name, 5, [1, 2])


def test_a_repeated_step_logs_no_other_action(way: Any) -> None:
    """Earlier, it was answered as the first one, which was recorded: the client did something else."""
    way.start(episode := f"{way.name}-repeats")
    way.step(episode, 0, [1, 2], action=41)
    for other in ({"observation": [1, 2], "action": 7}, {"observation": [2, 2], "action": 41}):
        with refused("step_order", match="was sent as another request; repeat that one, or abort"):
            way.step(episode, 0, **other)
    assert way.step(episode, 0, [1, 2], action=41)["next_step"] == 1
    way.step(episode, 1, [3, 2], reward=1.0)
    assert way.step(episode, 1, [3, 2], reward=2.0)["next_step"] == 2, "older clients add what was logged since"
    way.abort(episode)


@pytest.mark.parametrize("observation", [[1], [[1, 2]], [1, 2, 3], [1, 1e9], []])
def test_an_observation_that_is_not_of_its_space_is_refused(way: Any, observation: Any) -> None:
    with pytest.raises(EnvContractError, match="obs should be"):
        way.step(way.name, 1, observation)


@pytest.mark.parametrize("action", [1000, -1, [1, 2], 2.5])
def test_an_action_that_is_not_of_its_space_is_refused(way: Any, action: Any) -> None:
    with pytest.raises(EnvContractError, match="actions should be"):
        way.step(way.name, 1, [1, 2], action=action)


@pytest.mark.parametrize("body", [{"reward": None}, {"reward": "3"}, {"end": "perhaps"}, {"info": [1]}])
def test_a_step_of_wrong_fields_is_refused_by_the_fields_name(way: Any, body: dict[str, Any]) -> None:
    with refused("bad_request", match=next(iter(body))):
        way.step(way.name, 1, [1, 2], **body)


def test_a_reward_that_is_no_finite_number_is_refused(shared: Served) -> None:
    way = ByHttp(shared, "t", "nan")
    way.open()
    way.start("nan")
    with refused("bad_request", match="reward"):
        way.say("PUT", "/v1/sessions/nan/episodes/nan/steps/0", b'{"observation": [1, 2], "reward": NaN}')
    for number in (b"NaN", b"Infinity"):
        with pytest.raises(EnvContractError, match="obs should be"):
            way.say("PUT", "/v1/sessions/nan/episodes/nan/steps/0", b'{"observation": [1, %b]}' % number)
    with PolicyClient(shared.endpoint) as client:
        episode = client.start_episode()
        with refused("no_action"):
            client.log_returns(episode, 1.0)
        client.get_action(episode, [1, 2])
        for reward in (float("nan"), float("inf"), 1e308, 10**400, "much", None):
            with pytest.raises(EnvContractError, match="reward should be a finite number"):
                client.log_returns(episode, reward)  # type: ignore[arg-type]
        client.end_episode(episode, [1, 3])


def test_a_client_with_the_session_id_of_another_client_is_refused(way: Any, shared: Served) -> None:
    other = type(way)(shared, "another-token", way.name)
    for say in (other.open, lambda: other.step(way.name, 1, [9, 9]), lambda: other.abort(way.name)):
        with refused("session_taken", match="belongs to another client"):
            say()
    other.close()


def test_a_message_over_the_cap_is_refused_before_it_is_sent_or_read(way: Any, shared: Served) -> None:
    info = {"text": "x" * LIMITS.max_message_bytes}
    with PolicyClient(shared.endpoint) as client:
        episode = client.start_episode()
        client.get_action(episode, [0, 0])
        client.log_returns(episode, 0.0, info)
        with pytest.raises(MessageTooLargeError, match="the server takes 65536"):
            client.get_action(episode, [0, 0])
        client.log_returns(episode, 0.0, {})
        client.end_episode(episode, [0, 0])
    if isinstance(way, ByHttp):
        with pytest.raises(MessageTooLargeError, match="more than 65536 bytes"):
            way.step(way.name, 1, [1, 2], info=info)


def test_a_message_nearly_as_large_as_the_cap_is_taken() -> None:
    with Served() as server, PolicyClient(server.endpoint) as client:
        episode = client.start_episode()
        for step, size in enumerate((0, 1 << 15, LIMITS.max_message_bytes - 1024, 0)):
            if step:
                client.log_returns(episode, 1.0, {"text": "x" * size})
            assert client.get_action(episode, [step, 1]) == rule([step, 1])
        client.end_episode(episode, [9, 1])
    assert [len(info["text"]) for info in server.episodes.episodes[episode].infos] == [1 << 15, 65536 - 1024, 0]


@pytest.mark.long
def test_an_observation_of_more_than_99999999_bytes_is_one_step() -> None:
    """The reference loses its place in the stream here: its header has eight decimal digits for the length."""
    spaces = Spaces(observation=Box(shape=(12_500_001,), dtype="<f8"), action=Discrete(n=1000))
    limits = replace(LIMITS, max_message_bytes=1 << 27)
    with Served(limits, spaces=spaces) as server, PolicyClient(server.endpoint) as client:
        episode, seen = client.start_episode(), np.zeros(12_500_001)
        for step in range(2):
            seen[1] = step
            assert client.get_action(episode, seen) == step
        client.abort_episode(episode)
    assert server.episodes.episodes[episode].actions == [0, 1]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v2", b"", "404"),
        ("POST", "/v1/sessions/s", b"", "404"),
        ("PUT", "/v1/sessions/s/episodes/e/steps/x", b"{}", "404"),
        ("PUT", "/v1/sessions/s/episodes/e/steps/0", b"{}", "400"),
        ("PUT", "/v1/sessions/s/episodes/e/steps/0", b"[" * 5000 + b"]" * 5000, "400"),
        ("PUT", "/v1/sessions/s/episodes/e/steps/0", b'{"a":' * 900 + b"1" + b"}" * 900, "400"),
        ("PUT", "/v1/sessions/s/episodes/e/steps/0", b"\xff\x00garbage", "400"),
        ("PUT", f"/v1/sessions/{'s' * 100}", b"", "400"),
        ("PUT", "/v1/sessions/nobody/episodes/e", b"", "404"),
    ],
)
def test_a_malformed_http_request_is_refused_with_its_status(
    shared: Served, method: str, path: str, body: bytes, status: str
) -> None:
    with pytest.raises(HeadraceError) as refused:
        ByHttp(shared, "t").say(method, path, body)
    assert refused.value.__notes__ == [status]


def test_paths_carry_percent_encoded_ids_with_slashes_and_non_ascii(shared: Served) -> None:
    way = ByHttp(shared, "t", "a%2Fb%20%C3%BC")
    way.open()
    for call in (way.start, lambda id: way.step(id, 0, [1.0, 2.0])):
        assert call("walk%2F1%25")["episode"] == "walk/1%"
    way.abort("walk%2F1%25")


@pytest.mark.parametrize("at", ["step", "row", "other"])
def test_a_request_at_which_the_server_fails_is_answered_and_harms_no_client(
    way: Any, shared: Served, at: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is known to do this: the server is made to fail at some of this client's."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a mistake of ours")

    sessions, observation = shared.dispatcher._sessions, EpisodeCodec.of(SPACES).observation
    where, names = {
        "step": (sessions, ["step"]),
        "row": (type(observation), ["read_rows", "rows_from_payloads"]),
        "other": (sessions, ["receive"]),
    }[at]
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        for name in names:
            patched.setattr(where, name, fail)
        for _ in range(3):
            with pytest.raises(ServingError, match="the server failed at this; its log says how"):
                way.abort(way.name) if at == "other" else way.step(way.name, 1, [2, 2])
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) <= 1, "one traceback in ten seconds"


def test_an_observation_at_which_the_server_fails_costs_no_other_its_row() -> None:
    def read_all(values: Sequence[int]) -> list[int]:
        return [10 // value for value in values]

    first, failed, last = read_each(read_all, [5, 0, 2])
    assert (first, last) == (2, 5)
    assert isinstance(failed, ZeroDivisionError)
