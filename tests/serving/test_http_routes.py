"""The routes of HTTP: the message that a path and a method stand for."""

from __future__ import annotations

import logging

import orjson
import pytest

from headrace.workers.serving.http import server as http_server
from headrace.workers.serving.http.connection import HttpRequest
from headrace.workers.serving.http.responses import HttpAnswer
from headrace.workers.serving.http.routes import Query, Routed, route
from headrace.workers.serving.serving_messages import (
    ClientBye,
    ClientHeartbeat,
    ClientHello,
    EpisodeAbort,
    EpisodeStart,
)
from support.serving.raw_http import HEALTH, RawHttp, put
from support.serving.served import Served

SESSION = "/v1/sessions/a%2Fb"
EPISODE = f"{SESSION}/episodes/%C3%A9"
IDS = {"session": "a/b", "token": "t"}


def routed(method: str, target: str, body: bytes = b"") -> Routed:
    return route(HttpRequest(method.encode(), target.encode(), {b"headrace-client": b"t"}, body, True))


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("GET", "/v1/health", Query.HEALTH),
        ("HEAD", "/v1/health?now", Query.HEALTH),
        ("GET", "/v1/spaces", Query.SPACES),
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
    ("method", "target", "status"),
    [
        ("POST", "/v1/health", 405),
        ("GET", SESSION, 405),
        ("HEAD", SESSION, 405),
        ("PUT", f"{SESSION}/heartbeat", 405),
        ("GET", f"{EPISODE}/steps/0", 405),
        ("PUT", f"{EPISODE}/steps/first", 404),
        ("PUT", f"{EPISODE}/steps/", 404),
        ("PUT", "/v1/sessions/", 404),
        ("GET", "/v1/health/", 404),
        ("GET", "/v2/health", 404),
    ],
)
def test_other_paths_are_404_and_other_methods_405(method: str, target: str, status: int) -> None:
    refusal = routed(method, target)
    assert isinstance(refusal, HttpAnswer)
    assert refusal.status == status
    message = f"{method} {target} is nothing that this server knows"
    assert orjson.loads(refusal.body) == {"error": "bad_request", "message": message, "facts": {}}


def test_a_request_at_which_the_server_fails_is_500_and_the_connection_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: HttpRequest) -> Routed:
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
        ("localhost\r\nHost: localhost", 400),
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
        says = "two Host headers" if "\r" in host else "http.token in keys.dir"
        assert status == 200 or says in told.body["message"]
    with Served(token="a-token-of-this-test") as server, RawHttp(server.url) as client:
        client.say(ask + b"Authorization: Bearer a-token-of-this-test\r\n\r\n")
        assert client.hear().status == (400 if "\r" in host else 200)
