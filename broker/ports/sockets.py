"""The broker's three sockets: ROUTER for workers, ROUTER for learners, XPUB for weights."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import zmq

from headrace.broker.files.state_file import Endpoints
from headrace.broker.ports.zap_auth import ZapAuthenticator
from headrace.schemas.basics.bounds import BROKER_CONNECTIONS
from headrace.schemas.credentials.keys import BrokerKeys
from headrace.schemas.errors import socket_folder_error
from headrace.schemas.frames.manifest import DEFAULT_LIMITS, WEIGHTS_LIMITS
from headrace.schemas.peers import sockets
from headrace.schemas.peers.port_watch import WATCH_EVENTS, PortWatch, connection_limit
from headrace.schemas.peers.ports import bind_to_port, check_insecure
from headrace.schemas.peers.socket_folder import endpoint_of, lock_sockets, make_socket_folder
from headrace.schemas.settings.config import BrokerSection

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]

_SUBSCRIPTION_BYTES = 16 << 10
"""The most that a subscriber may send. A worker's subscription has five bytes."""
_MOST_FRAMES = DEFAULT_LIMITS.frames + 1
"""Frames of a message that `receive` keeps, the peer's route among them. A decoder refuses a message with more."""


class BrokerSockets:
    """The bound sockets, their endpoints, and the authenticator of their peers.

    Raises `PortInUseError`. Raises `ConfigError` for a host that is not this machine's, or one without keys. Raises
    `RunDirError` where Unix sockets cannot be bound for this user alone.
    """

    def __init__(self, config: BrokerSection, run_dir: Path, before: Endpoints | None, keys: BrokerKeys | None) -> None:
        self._folder = make_socket_folder(run_dir) if not config.host else None
        if self._folder is None and keys is None:
            check_insecure(config.host, "broker.host", "broker.allow_insecure", allowed=config.allow_insecure)
        self._own = sockets.OwnSockets(zmq.Context(), "the broker", 0.5)
        self.auth = ZapAuthenticator(self._own, keys)
        self._places = connection_limit(BROKER_CONNECTIONS, ports=3)
        batches, versions = config.max_batch_bytes + (1 << 20), WEIGHTS_LIMITS.payload_bytes + (1 << 20)
        try:
            if self._folder is not None:
                lock_sockets(self._own, self._folder, "broker", Endpoints.model_fields)
            self.workers, worker = self._bind(config, "worker", before, batches)
            self.learners, learner = self._bind(config, "learner", before, versions)
            self.weights, weights = self._bind(config, "weights", before, _SUBSCRIPTION_BYTES)
        except BaseException:
            self._own.close(0.0)
            raise
        self.endpoints = Endpoints(worker=worker, learner=learner, weights=weights)

    def _bind(
        self, config: BrokerSection, role: str, before: Endpoints | None, largest_frame: int
    ) -> tuple[Socket, str]:
        """Bind one socket: to its place in the folder of Unix sockets, or to a port."""
        kind, options = (zmq.XPUB, sockets.XPUB) if role == "weights" else (zmq.ROUTER, sockets.ROUTER)
        waiting = {"SNDHWM": sockets.MOST_WAITING} if role == "worker" else {}
        # Unix sockets are for this user alone, even if the folder is opened to others later.
        family = {"IPV6": int(":" in config.host)} if self._folder is None else {"IPC_FILTER_UID": os.geteuid()}
        limits = waiting | {"MAXMSGSIZE": largest_frame} | family
        socket: Socket = self._own.open(kind, options | limits)
        if role == "weights":
            socket.copy_threshold = sockets.COPY_BELOW_BYTES
        on_failure = self.auth.guard(socket, role)
        monitor = self._own.monitor(socket, WATCH_EVENTS)
        watch = PortWatch(role, monitor, self._places, on_failure, by_key=self.auth.keys is not None)
        self._own.before_end.append(partial(watch.close, socket))
        if self._folder is not None:
            _bind_in_folder(socket, self._folder, role)
        else:
            port = config.ports[role] or (before.port(role) if before is not None else 0)
            bind_to_port(socket.bind, config.host, port, "broker.host")
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def close(self) -> None:
        """Close all sockets; messages already sent have half a second to leave."""
        self._own.close()


def receive(socket: Socket) -> list[zmq.Frame] | None:
    """Return the next message, its frames without a copy; None if there is none, or its connection ended meanwhile.

    If a message has more frames than any decoder takes, read the rest and drop it.
    """
    try:
        last = socket.recv(sockets.DONTWAIT, copy=False)
        frames = [last]
        while last.more:
            last = socket.recv(sockets.DONTWAIT, copy=False)
            if len(frames) <= _MOST_FRAMES:
                frames.append(last)
    except zmq.Again:
        return None
    return frames


def _bind_in_folder(socket: Socket, folder: Path, role: str) -> None:
    """Bind a Unix socket, in place of one that a dead broker has left at its path."""
    try:
        socket.bind(endpoint_of(folder, role))
    except zmq.ZMQError as error:
        reason = f"no socket can be made in it ({error}); name a run directory on another disk, or set"
        raise socket_folder_error(str(folder), f"{reason} broker.host, with keys") from error
