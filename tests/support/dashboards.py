"""A dashboard as a process of its own, and HTTP requests to it."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from support.waiting import TIMEOUT_S, wait_until


class Dashboard:
    """`headrace dashboard` with `arguments`; use as a context manager, so that it ends with the test."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._log = folder / "dashboard.log"
        command = [sys.executable, "-m", "headrace.deploy", "dashboard", *arguments]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.address = wait_until(self._address, "the address of the dashboard")

    def _address(self) -> str:
        assert self.process.poll() is None, self.said()
        found = re.search(r"http://\S+/", self.said())
        return found[0] if found else ""

    def said(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(100)


class Answer:
    """The answer to one request."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    def json(self) -> Any:
        return orjson.loads(self.body)


def ask(address: str, path: str = "/", method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
    """Send one request, and return its answer."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        return Answer(connection.getresponse())
    finally:
        connection.close()


class States:
    """The stream of states of a dashboard."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        self._connection.request("GET", "/events")
        self._response = self._connection.getresponse()
        self.headers = {name.lower(): value for name, value in self._response.getheaders()}

    def next(self) -> Any:
        """Return the next state; None after the last one."""
        while line := self._response.readline():
            if line.startswith(b"event: end"):
                return None
            if line.startswith(b"data: {"):
                return orjson.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream was cut")

    def close(self) -> None:
        self._connection.close()
