"""Malformed bytes at the HTTP port: the server answers in JSON where it can, and no other client notices."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest

from support.serving.raw_http import HEALTH, RawHttp, head, put
from support.serving.served import Served

EPISODE = "/v1/sessions/s/episodes/e"
STEP = f"{EPISODE}/steps/0"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served() as served:
        yield served


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # somebody speaks TLS
        b"nonsense\r\n\r\n",
        b"BREW /pot HTTP/1.1\r\n\r\n",
        b"PUT / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\na\x00b: c\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        head(STEP, "Content-Length: -5"),
        head(STEP, "Content-Length: five"),
        head(STEP, "Content-Length: 99999999999999999999999"),
        head(STEP, "Content-Length: 2", "Content-Length: 3") + b"{}",
        head(STEP, "Content-Length: 2", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n",
        head(STEP, "Transfer-Encoding: chunked") + b"xyz\r\n{}\r\n",
        head(STEP, "Transfer-Encoding: chunked") + b"2\r\n{}garbage",
        head(STEP, "Transfer-Encoding: chunked") + b"fffffffffffffffff\r\n",
        head(STEP, "Transfer-Encoding: gzip"),
        head(STEP, "Connection: upgrade", "Upgrade: websocket", "Content-Length: 0"),
        b"CONNECT other:443 HTTP/1.1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http_get_a_400_and_the_connection_closes(server: Served, data: bytes) -> None:
    with RawHttp(server.url) as client:
        client.say(data)
        client.hear_refusal(400, "bad_request")


@pytest.mark.parametrize(
    ("request_", "status", "says"),
    [
        (b"GET /v1/sessions/s HTTP/1.1\r\n\r\n", 404, "nothing that this server knows"),
        (b"OPTIONS * HTTP/1.1\r\n\r\n", 404, "nothing that this server knows"),
        (b"GET /%ff%00%zz HTTP/1.1\r\n\r\n", 404, "nothing that this server knows"),
        (b"GET http://elsewhere/v1 HTTP/1.1\r\n\r\n", 404, "nothing that this server knows"),
        (put(f"{EPISODE}/steps/{'9' * 5000}"), 404, "nothing that this server knows"),
        (put(f"{EPISODE}/steps/-1"), 404, "nothing that this server knows"),
        (put(f"{EPISODE}/steps/9999999999999999999"), 400, "step"),
        (put(STEP, b'{"observation": [1, 2]}', token=""), 400, "Headrace-Client is missing"),
        (put(STEP, b"\xff\xfe{}"), 400, "not JSON"),
        (put(STEP, b'{"observation": "\xc3\x28"}'), 400, "not JSON"),
        (put(STEP, b'{"observation": [NaN, 1]}'), 422, "free of NaN"),
        (put(STEP, b'{"observation": [1e999, 1]}'), 422, "values from 1.0 to inf"),
        (put(STEP, b'{"observation": [1, 2], "info": NaN' + b"[" * 9000), 400, "not JSON"),
        (put(STEP, b'{"observation": [' + b"9" * 400 + b", 1]}"), 400, "not JSON"),
        (put(STEP, b'{"observation": [' + b"9" * 300 + b", 1]}"), 422, "obs should be"),
        (put(STEP, b'{"observation": ' + b"[" * 900 + b"]" * 900 + b"}"), 400, "levels"),
        (put(STEP, b"[" * 9999), 400, "not JSON"),
        (put(STEP, b"observation=1&reward=2", "Content-Type: application/x-www-form-urlencoded"), 400, "not JSON"),
        (put(STEP, b"[]"), 400, "no JSON object"),
        (put(STEP, b'{"observation": [1, 2], "reward": 1, "reward": "x"}'), 400, "reward"),
        (
            put(STEP, b'{"observation": [1, 2], "rewards": 1.0}'),
            400,
            "'rewards' is no field of this request; did you mean",
        ),
        (put(STEP, b'{"observation": [1, 2], "' + b"x" * 50_000 + b'": 1.0}'), 400, "is no field of this request"),
        (put(EPISODE, b'{"training_enable": false}'), 400, "did you mean 'training_enabled'?"),
    ],
)
def test_a_bad_request_gets_its_error_and_the_connection_stays_open(
    server: Served, request_: bytes, status: int, says: str
) -> None:
    with RawHttp(server.url) as client:
        client.say(put("/v1/sessions/s"))
        assert client.hear().status == 200
        client.say(request_)
        told = client.hear()
        assert (told.status, set(told.body)) == (status, {"error", "message", "facts"}), told
        assert says in told.body["message"]
        client.say(HEALTH)
        assert client.hear().status == 200


def test_the_last_of_equal_json_keys_counts_and_any_content_type_is_json(server: Served) -> None:
    with RawHttp(server.url) as client:
        client.say(put("/v1/sessions/twice") + put("/v1/sessions/twice/episodes/twice"))
        assert [client.hear().status for _ in range(2)] == [200, 200]
        body = b'{"observation": [9, 9], "observation": [1, 2]}'
        client.say(put("/v1/sessions/twice/episodes/twice/steps/0", body, "Content-Type: text/plain; charset=latin-1"))
        assert client.hear().body["action"] == 9


def test_requests_on_one_connection_are_answered_in_order_up_to_a_malformed_one(server: Served) -> None:
    with RawHttp(server.url) as client:
        client.say(put("/v1/sessions/many") + put("/v1/sessions/many/episodes/many"))
        steps = b"".join(
            put(f"/v1/sessions/many/episodes/many/steps/{step}", b'{"observation": [%d, 0]}' % step)
            for step in range(50)
        )
        client.say(steps + b"GET /v1/none HTTP/1.1\r\n\r\n" * 3000 + b"garbage\r\n\r\n" + HEALTH)
        assert [client.hear().status for _ in range(2)] == [200, 200]
        assert [client.hear().body["action"] for _ in range(50)] == [7 * step for step in range(50)]
        assert {client.hear().status for _ in range(3000)} == {404}
        client.hear_refusal(400, "bad_request")


def test_a_client_that_stops_sending_still_gets_its_answers(server: Served) -> None:
    for ends in ("HTTP/1.0", "HTTP/1.1\r\nConnection: close"):
        with RawHttp(server.url) as client:
            client.say(f"GET /v1/spaces {ends}\r\n\r\n".encode())
            told = client.hear()
            assert (told.status, told.headers["connection"]) == (200, "close")
            client.hear_end()
    with RawHttp(server.url) as client:
        client.say(HEALTH + HEALTH)
        client.said_all()
        assert [client.hear().status for _ in range(2)] == [200, 200]
        client.hear_end()


def test_head_gets_no_body_and_expect_continue_gets_a_100(server: Served) -> None:
    with RawHttp(server.url) as client:
        client.say(HEALTH.replace(b"GET", b"HEAD") + b"GET / HTTP/1.0\r\n\r\n")
        first, second, body = client.rest().split(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200 OK\r\n")
        assert second.startswith(b"HTTP/1.1 404 Not Found\r\n")
        assert orjson.loads(body)["error"] == "bad_request"
    with RawHttp(server.url) as client:
        client.say(head("/v1/sessions/big", "Expect: 100-continue", "Content-Length: 2"))
        while b"\r\n\r\n" not in client.read:
            client.more()
        assert client.read == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.read = b""
        client.say(b"{}")
        assert client.hear().status == 200
