"""A client of a policy server in Python's standard library alone: plays episodes of a small game by HTTP.

    python http_client.py URL EPISODES [TOKEN]

The game: a counter goes from 0 to 4, and each step pays what the counter was. Prints one line of JSON an episode.
"""

from __future__ import annotations

import http.client
import json
import secrets
import sys
import time
import urllib.parse
from typing import Any


class ServerRefusedError(RuntimeError):
    """The server refuses a request; `code` is its word for the reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class PolicyServer:
    """One connection, for one thread. It retries a request until the server answers. The server takes no step twice."""

    def __init__(self, url: str, token: str | None = None) -> None:
        address = urllib.parse.urlsplit(url)
        connect = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        self._connection = connect(address.hostname or "", address.port, timeout=60)
        self.session = f"/v1/sessions/python-{secrets.token_hex(8)}"
        self._headers = {"Headrace-Client": secrets.token_hex(16), "Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
        """Return the answer. Raises `ServerRefusedError`, and OSError when no answer comes for `timeout_s` seconds."""
        data = json.dumps(body or {}).encode()
        until = time.monotonic() + timeout_s
        while True:
            try:
                self._connection.request(method, path, data, self._headers)
                with self._connection.getresponse() as response:
                    told = json.load(response)
                if response.status == 200:
                    return told
                if told["error"] not in ("not_yet", "no_place") or time.monotonic() > until:
                    raise ServerRefusedError(told["error"], told["message"])
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()  # the next request opens it again
                if time.monotonic() > until:
                    raise ConnectionError(f"no answer from {self._connection.host}: {error}") from error
            time.sleep(0.1)

    def close(self) -> None:
        """Close the connection; the session ends by itself if it was not ended."""
        self._connection.close()


def play(server: PolicyServer, name: str) -> list[Any]:
    """Play one episode; return the actions."""
    episode = f"{server.session}/episodes/{name}"
    server.ask("PUT", episode, {"training_enabled": True})
    actions = []
    for counter in range(4):
        reward = counter - 1 if counter else 0
        step = {"observation": [counter, 1], "reward": reward}
        actions.append(server.ask("PUT", f"{episode}/steps/{counter}", step)["action"])
    server.ask("PUT", f"{episode}/steps/4", {"observation": [4, 1], "reward": 3, "end": "terminated"})
    return actions


def main(url: str, episodes: str, token: str | None = None) -> None:
    """Open a session, play, and end it."""
    server = PolicyServer(url, token)
    server.ask("PUT", server.session)
    for number in range(int(episodes)):
        name = f"python-{secrets.token_hex(8)}"
        sys.stdout.write(json.dumps({"episode": name, "number": number, "actions": play(server, name)}) + "\n")
    server.ask("DELETE", server.session)
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
