"""The routes of HTTP: the message that a path and a method stand for."""

from __future__ import annotations

import logging

import orjson
import pytest

from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.http import server as http_server
from headrace.workers.serving.http.requests import HttpRequest, Routed, route
from headrace.workers.serving.http.responses import HttpAnswer, json_answer
from headrace.workers.serving.serving_messages import (
    ClientBye,
    ClientHeartbeat,
    ClientHello,
    EpisodeAbort,
    EpisodeStart,
)
from support.serving.plain_episodes import SPACES
from support.serving.raw_http import HEALTH, RawHttp, put
from support.serving.served import Served

SESSION = "/v1/sessions/a%2Fb"
EPISODE = f"{SESSION}/episodes/%C3%A9"
IDS = {"session": "a/b", "token": "t"}
CODEC = EpisodeCodec.of(SPACES)


def routed(method: str, target: str, body: bytes = b"") -> Routed:
    return route(HttpRequest(method, target.encode(), {b"headrace-client": b"t"}, body, True), CODEC)


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("GET", "/v1/spaces", json_answer(CODEC.spaces_json)),
        ("HEAD", "/v1/spaces?now", json_answer(CODEC.spaces_json)),
        ("PUT", SESSION, ClientHello(**IDS)),
        ("DELETE", SESSION, ClientBye(**IDS)),
        ("POST", f"{SESSION}/heartbeat", ClientHeartbeat(**IDS)),
        ("PUT", EPISODE, EpisodeStart(**IDS, episode="é")),
        ("DELETE", EPISODE, EpisodeAbort(**IDS, episode="é")),
        ("DELETE", f"{EPISODE}?reason=a&reason=fell%21+over", EpisodeAbort(**IDS, episode="é", reason="fell! over")),
    ],
)
def test_each_path_and_method_stand_for_one_message(method: str, target: str, expected: Routed) -> None:
    assert routed(method, target) == expected


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/v1/health"),
        ("GET", SESSION),
        ("HEAD", SESSION),
        ("PUT", f"{SESSION}/heartbeat"),
        ("GET", f"{EPISODE}/steps/0"),
        ("PUT", f"{EPISODE}/steps/first"),
        ("PUT", f"{EPISODE}/steps/"),
        ("GET", "/v1/health/"),
        ("GET", "/v2/health"),
    ],
)
def test_other_paths_and_methods_are_404(method: str, target: str) -> None:
    refusal = routed(method, target)
    assert isinstance(refusal, HttpAnswer)
    assert refusal.status == 404
    message = f"{method} {target} is nothing that this server knows"
    assert orjson.loads(refusal.body) == {"error": "bad_request", "message": message, "facts": {}}


def test_a_request_at_which_the_server_fails_is_500_and_the_connection_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: HttpRequest, codec: EpisodeCodec) -> Routed:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(http_server, "route", fail)
    with Served() as server, RawHttp(server.url) as client, caplog.at_level(logging.ERROR):
        client.say(put("/v1/sessions/s"))
        told = client.hear()
        assert (told.status, told.body["error"]) == (500, "failed")
        assert "a mistake of ours" in caplog.text
        monkeypatch.undo()
        client.say(HEALTH)
        assert client.hear().status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("LOCALHOST.", 200),
        ("127.0.0.1", 200),
        ("10.1.2.3:80", 200),
        ("[::1]:8080", 200),
        ("policy.example", 200),
        ("evil.example", 400),
        ("localhost.evil.example:80", 400),
        ("127.0.0.1.evil.example", 400),
        ("policy.example@evil.example", 400),
        ("evil@localhost", 400),
        ("localhost:80@evil", 400),
        ("", 400),
        ("[", 400),
        ("\xe9", 400),
    ],
)
def test_a_request_with_an_unknown_host_name_is_refused(host: str, status: int) -> None:
    """DNS rebinding: the browser of a foreign page sends its host name. With a token, any host name is served."""
    ask = f"GET /v1/spaces HTTP/1.1\r\nHost: {host}\r\n".encode("latin-1")
    with Served(http_hosts=frozenset(["policy.example"])) as server, RawHttp(server.url) as client:
        client.say(ask + b"\r\n")
        told = client.hear()
        assert told.status == status, told
        assert status == 200 or "http.token in keys.dir" in told.body["message"]
    with Served(token="a-token-of-this-test") as server, RawHttp(server.url) as client:
        client.say(ask + b"Authorization: Bearer a-token-of-this-test\r\n\r\n")
        assert client.hear().status == 200
