"""A policy server as an external env: its `run()` is the desk, and its episodes are those of clients elsewhere."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.schemas.config import is_loopback
from headrace.schemas.errors import ConfigError, PortInUseError
from headrace.schemas.keys import CLIENT_PORT, TOKEN_FILE, BrokerKeys, client_keys, read_client_port_keys
from headrace.schemas.serving_settings import HIGHEST_PORT, ServingSection
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import find_creator
from headrace.workers.envs.remote.door import Door, DoorSettings
from headrace.workers.external.env import ExternalEnv
from headrace.workers.serving.bearer_token import read_token
from headrace.workers.serving.desk import Desk, SpaceValues
from headrace.workers.serving.exchange import Exchange
from headrace.workers.serving.frames import FramesDoor
from headrace.workers.serving.listening import listen
from headrace.workers.serving.records import ServingLimits

log = logging.getLogger(__name__)


class ServedEnvs:
    """Creates the env of one worker, again and again if need be: at the same ports, though they were free ones first.

    `like` is an env, or whatever else a runner's config may name that has both spaces: it is built to look at them.
    """

    def __init__(
        self,
        settings: ServingSection,
        like: str | Callable[..., Any],
        keys_dir: str | None,
        *,
        check_bounds: bool = True,
    ) -> None:
        self._settings = settings
        self._like = like
        self._keys_dir = keys_dir
        self._check_bounds = check_bounds
        self._ports: tuple[int, int] | None = None
        self.exchange = Exchange(settings.max_message_bytes) if settings.client_inference else None
        """With clients that act by themselves, if there may be any. It outlives each env."""

    def __call__(self, context: EnvContext) -> ServedEnv:
        """Bind the ports. Raises `ConfigError`, `KeysError`, `PortInUseError`, and what the env's creator raises."""
        spaces = self._look(context)
        keys = client_keys(self._keys_dir, "worker") if self._keys_dir != "" else None
        folder = Path(keys.folder) if keys is not None else None
        token = self._token(folder)
        if self._settings.http_port is not None:
            _check_http_can_be_served()
        port, http_port = self._ports or self._at(context.worker_index)
        door = self._open_door(port, read_client_port_keys(folder) if folder is not None else None)
        try:
            listener = self._listen(http_port, token) if self._settings.http_port is not None else None
        except BaseException:
            door.close()
            raise
        env = ServedEnv(*spaces, self._settings, door, listener, token, self.exchange, check_bounds=self._check_bounds)
        self._ports = env.ports
        return env

    def _look(self, context: EnvContext) -> tuple[Any, Any]:
        env = find_creator(self._like)(context)
        spaces = env.action_space, env.observation_space
        if hasattr(env, "close"):
            env.close()
        return spaces

    def _at(self, slot: int) -> tuple[int, int]:
        port, http_port = (base and base + slot for base in (self._settings.port, self._settings.http_port or 0))
        if max(port, http_port) > HIGHEST_PORT:
            raise ConfigError(f"port {max(port, http_port)} of slot {slot} is above {HIGHEST_PORT}", key="serving.port")
        return port, http_port

    def _token(self, folder: Path | None) -> str | None:
        if self._settings.http_port is None:
            return None
        if self._settings.http_token:
            return read_token(Path(self._settings.http_token))
        return read_token(folder / TOKEN_FILE) if folder is not None else None

    def _open_door(self, port: int, keys: BrokerKeys | None) -> Door:
        s = self._settings
        return Door(
            DoorSettings(
                s.host,
                port,
                keys,
                s.allow_insecure,
                CLIENT_PORT,
                "clients",
                "serving",
                largest_frame=s.max_message_bytes,
            )
        )

    def _listen(self, port: int, token: str | None) -> socket.socket:
        s = self._settings
        if token is None and not is_loopback(s.host):
            if not s.allow_insecure:
                message = (
                    f"{s.host} is reachable from other machines, and there is no token; name its file in "
                    "serving.http_token (`headrace keys init` makes http.token), or listen on loopback"
                )
                raise ConfigError(message, key="serving.host")
            log.warning("serving HTTP clients on %s without a token, as configured", s.host)
        try:
            return listen(s.host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(f"http://{s.host}:{port}") from error
            raise ConfigError(f"{s.host!r} cannot be bound: {error.strerror}", key="serving.host") from error


def _check_http_can_be_served() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error}; pip install 'headrace[http]'", key="serving.http_port") from error


class ServedEnv(ExternalEnv):
    """Serves clients at `door`, and by HTTP at `listener`, for as long as its runner lets it."""

    def __init__(
        self,
        action_space: Any,
        observation_space: Any,
        settings: ServingSection,
        door: Door,
        listener: socket.socket | None,
        token: str | None,
        exchange: Exchange | None,
        *,
        check_bounds: bool,
    ) -> None:
        super().__init__(action_space, observation_space)
        self._settings = settings
        self._door, self._listener, self._token = door, listener, token
        self._exchange = exchange
        self._check_bounds = check_bounds
        self._lock = threading.Lock()
        self._desk: Desk | None = None
        self._closed = False
        self.endpoint = door.endpoint
        http_port = listener.getsockname()[1] if listener is not None else 0
        self.ports = int(door.endpoint.rsplit(":", 1)[1]), int(http_port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{http_port}" if listener is not None else ""
        """Empty without HTTP."""
        log.info("serving clients at %s%s", self.endpoint, f" and {self.url}" if self.url else "")

    def run(self) -> None:
        """Serve until the env is closed."""
        s = self._settings
        values = SpaceValues.of(self.episodes.spaces, check_bounds=self._check_bounds)
        limits = ServingLimits(
            lease_s=s.lease_s,
            max_sessions=s.max_sessions,
            max_episodes=self.episodes.capacity,
            max_message_bytes=s.max_message_bytes,
        )
        with self._lock:
            if self._closed:
                return
            door = FramesDoor(self._door, values, s.max_message_bytes)
            self._desk = Desk(self.episodes, values, limits, door, self._exchange)
        try:
            self._serve(self._desk, values, limits)
        finally:
            self._desk.close()
            self._release()

    def _serve(self, desk: Desk, values: SpaceValues, limits: ServingLimits) -> None:
        if self._listener is None:
            desk.serve()
            return
        from headrace.workers.serving.http_way import HttpWay  # needs the extra `http`

        way = HttpWay(desk, values, limits, self._listener, self._token)
        try:
            desk.serve()
        finally:
            way.stop()

    def close(self) -> None:
        """Have `run` end; what it has bound is free when it has."""
        with self._lock:
            self._closed, desk = True, self._desk
        if desk is None:
            self._release()
        else:
            desk.stop()

    def _release(self) -> None:
        self._door.close()
        if self._listener is not None:
            self._listener.close()
