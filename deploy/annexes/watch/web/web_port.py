"""A read-only HTTP port. Off loopback it needs a token. `access.py` checks each request."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from headrace.deploy.annexes.watch.web.access import HEAD_BYTES, Guard
from headrace.deploy.process.service_manager import service_manager
from headrace.schemas.credentials.tokens import read_token
from headrace.schemas.errors import ConfigError, PortInUseError
from headrace.schemas.peers.advertised import in_url
from headrace.schemas.settings.config import is_loopback

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
"""At once; more are answered with 503. A browser has six, of which one follows a page."""
_ANSWERS_S, _CLOSE_S = 3, 5.0
"""Seconds for answers under way, such as the last state of a stream, and for the end of the thread that serves."""


class WebPort:
    """A listening socket and the token that its clients show. Close it with `with`.

    Raises `ConfigError` for an address that cannot be used, `KeysError` for a token file that cannot, and
    `PortInUseError`.
    """

    def __init__(self, listen: str, token_file: Path | None) -> None:
        host, port = parse_address(listen)
        if token_file is None and not is_loopback(host):
            raise ConfigError(
                f"{host} is reachable from other machines, and there is no token; name its file with --token-file "
                "(`headrace keys init` makes keys/http.token), or listen on loopback",
                key="--listen",
            )
        self._token = read_token(token_file) if token_file is not None else None
        if token_file is not None and not is_loopback(host):
            log.warning(
                "HTTP on %s is not encrypted: browsers and scrapers send the token in clear; put TLS in front of it, "
                "and listen on loopback behind that",
                host,
            )
        self._socket = _listen(host, port)
        self._thread: threading.Thread | None = None
        self.url = f"http://{in_url(host)}:{self._socket.getsockname()[1]}"

    def serve(self, app: ASGIApp, stopping: threading.Event) -> None:
        """Serve `app` until the event is set; then end within seconds."""
        with self.serving(app) as thread:
            while not stopping.wait(1.0) and thread.is_alive():
                pass

    @contextmanager
    def serving(self, app: ASGIApp, public: Collection[str] = ()) -> Iterator[threading.Thread]:
        """Serve `app` in a thread within the block; then end within seconds. `public`: paths that need no token.

        If no client is connected, the block does not wait for the thread, which may live 0.2 s longer.
        """
        config = uvicorn.Config(
            Guard(app, self._token, self._socket.getsockname()[1], public),
            log_config=None,
            log_level="error",  # a warning for each bad request would let clients fill the log
            access_log=False,
            server_header=False,
            lifespan="off",
            http="h11",  # httptools bounds neither request line nor headers
            h11_max_incomplete_event_size=HEAD_BYTES,
            ws="none",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=_ANSWERS_S,
            callback_notify=_on_turn,
            timeout_notify=0,
        )
        server = uvicorn.Server(config)
        self._thread = thread = threading.Thread(target=server.run, args=([self._socket],), name="http", daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            server.should_exit = True
            if server.server_state.connections:
                thread.join(_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None or not self._thread.is_alive():  # else the thread closes it
            self._socket.close()


async def _on_turn() -> None:
    """Give a sign of life from the event loop that answers requests, once a second."""
    service_manager().turn()


def parse_address(text: str) -> tuple[str, int]:
    """Return (host, port) of HOST:PORT, or of [IPV6]:PORT. Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:9747 or [::1]:9747", key="--listen")
    return host, int(port)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"http://{host}:{port}", "--listen") from error
        raise ConfigError(f"{host!r} cannot be bound: {error.strerror}", key="--listen") from error
