"""Requests that are sealed as they should be and say anything: each field may be missing, strange, or of another kind.

Bytes that were merely damaged are told by their checksum; these pass it, and what is behind has to judge them.
"""

from __future__ import annotations

import http.client
import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import orjson
from numpy.typing import NDArray

from headrace.schemas.errors.serving import HTTP_STATUS
from headrace.schemas.frames.wire import MessageKind
from headrace.workers.serving.serving_messages import REQUESTS
from support.waiting import TIMEOUT_S

_NUMBERS = [0, 1, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 1.5, -0.0, 1e39, 1e308, -1e308]
_TEXTS = ["", "x", "NaN", "no", "terminated", "client", "../..", "a" * 65, "a" * 5000, "é\u0000\u202e", "own", "e-0"]
_OTHERS = [None, True, False, [], {}, [1], {"a": 1}, {"": [None, {}]}, [[[]]], [None] * 50]
_FIELDS = ["request", "session", "token", "episode", "step", "reward", "info"]
_FIELDS += ["off_policy", "end", "training_enabled", "reason", "role", "payload"]
_DTYPES = ["|b1", "|i1", "|u1", "<i2", "<i4", "<i8", "<u8", "<f2", "<f4", "<f8"]
_SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (2,), (3,), (2, 2), (1, 2), (0, 2), (2, 1, 1)]
_LIKELY = [MessageKind.EPISODE_STEP] * 12 + [MessageKind.EPISODE_START] * 4 + list(REQUESTS)


class Hostile:
    """The client `own` of session `session`, which knows the steps of its episodes as long as it is told them."""

    def __init__(self, seed: int, session: str) -> None:
        self._rng = random.Random(seed)
        self._session = session
        self._episodes = ["e-0"]
        self._steps: dict[str, int] = {}

    def heard(self, answer: dict[str, Any]) -> None:
        """The server's answer."""
        if "next_step" in answer:
            self._steps[answer["episode"]] = answer["next_step"]

    def message(self) -> tuple[MessageKind, dict[str, Any], dict[str, NDArray[Any]]]:
        """For ZeroMQ: kind, header, arrays."""
        rng = self._rng
        kind = rng.choice(list(MessageKind)) if rng.random() < 0.03 else rng.choice(_LIKELY)
        header: dict[str, Any] = {"request": rng.randrange(9), "session": self._session, "token": "own"}
        if kind.name.startswith("EPISODE"):
            header["episode"] = self._episode()
        if kind is MessageKind.EPISODE_STEP:
            header |= {"step": self._step(header["episode"]), **self._of_a_step()}
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            header[rng.choice(_FIELDS)] = self._strange()
        if rng.random() < 0.03:
            del header[rng.choice(list(header))]
        arrays = {"obs": np.zeros(2, np.float32)} if rng.random() < 0.9 else {}
        if header.get("off_policy") is True:
            arrays["actions"] = np.array(7)
        if rng.random() < 0.2:
            arrays[rng.choice(["obs", "actions", "obs/a", "actions/0", "x", ""])] = self._array()
        return kind, header, arrays

    def request(self) -> tuple[str, str, bytes, dict[str, str]]:
        """For HTTP: method, path, body, headers."""
        rng = self._rng
        session = self._session if rng.random() < 0.95 else quote(str(self._strange()), safe="")[:2000]
        episode = self._episode() if rng.random() < 0.95 else quote(str(self._strange()), safe="")[:2000]
        step = self._step(episode) if rng.random() < 0.95 else self._strange()
        path = f"/v1/sessions/{session}/episodes/{episode}"
        path = rng.choice(
            [f"{path}/steps/{quote(str(step))[:2000]}"] * 9 + [path] * 4 + [f"/v1/sessions/{session}"] * 2
        )
        body: dict[str, Any] = {"observation": [0, 0], **self._of_a_step()} if "/steps/" in path else {}
        if body.pop("off_policy", False):
            body["action"] = rng.choice([1, 1.0, [1], True, "1", 10**9])
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            body[rng.choice(["observation", "action", *_FIELDS])] = rng.choice([self._strange(), [self._strange()] * 2])
        raw = bytearray(orjson.dumps(body if rng.random() < 0.97 else self._strange()))
        if rng.random() < 0.03:
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        stranger = "/episodes/" in path and rng.random() < 0.03  # who opens a session has it until its lease ends
        token = rng.choice(["", "other", "x" * 70]) if stranger else "own"
        method = "PUT" if rng.random() < 0.95 else rng.choice(["DELETE", "POST", "GET", "PATCH"])
        return method, path, bytes(raw), {"Headrace-Client": token}

    def _episode(self) -> str:
        if self._rng.random() < 0.1:
            self._episodes.append(f"e-{len(self._episodes)}")
        return f"{self._session}-{self._rng.choice(self._episodes[-4:])}"

    def _step(self, episode: str) -> int:
        return self._steps.get(episode, 0) + self._rng.choice([0] * 9 + [-1, 1])

    def _of_a_step(self) -> dict[str, Any]:
        rng, fields = self._rng, dict[str, Any]()
        if rng.random() < 0.3:
            fields["reward"] = rng.choice([1, 0.5, 1e308, -1e308])
        if rng.random() < 0.1:
            fields["info"] = rng.choice([{"a": 1}, {"": [None, {}]}, {"a": "x" * 2000}])
        if rng.random() < 0.05:
            fields["end"] = rng.choice(["terminated", "truncated"])
        if rng.random() < 0.2:
            fields["off_policy"] = True
        return fields

    def _strange(self) -> Any:
        return self._rng.choice(self._rng.choice([_NUMBERS, _TEXTS, _OTHERS]))  # type: ignore[arg-type]

    def _array(self) -> NDArray[Any]:
        number = self._rng.choice([0.0, 1.0, 255.0, 1e30, np.nan, np.inf, -np.inf])
        with np.errstate(all="ignore"):
            return np.full(self._rng.choice(_SHAPES), number).astype(self._rng.choice(_DTYPES))


def codes_by_http(hostile: Hostile, url: str, messages: int, go_on: Callable[[], None]) -> Counter[str]:
    """How often each error was answered, and "" where there was none; now and then `go_on` is called."""
    told, address = Counter[str](), urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
    for number in range(messages):
        connection.request(*hostile.request())
        with connection.getresponse() as response:
            answer = orjson.loads(response.read())
        hostile.heard(answer)
        assert response.status < 500 or HTTP_STATUS.get(answer["error"]) == response.status, answer
        told[answer.get("error", "")] += 1
        if number % 100 == 0:
            go_on()
    connection.close()
    return told
