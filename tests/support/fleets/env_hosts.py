"""Env hosts as processes, and a cable to pull between them and the worker."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from headrace.schemas.peers.socket_folder import endpoint_of
from support.ports import free_port
from support.socket_folders import socket_folder


class EnvHosts:
    """Starts `headrace env-host`s, and ends them all.

    They connect by Unix sockets in `socket_dir`, or for None in a new folder that is removed at the end. With a `port`
    they connect by TCP on loopback, without keys.

    - at: the settings of an `EnvRunnerConfig` whose runner listens for them. The config of a fleet has none of these:
      there `socket_dir` is `make_socket_folder(RUN)`.
    """

    def __init__(self, folder: Path, port: int | None = None, *, socket_dir: Path | None = None) -> None:
        self._folder, self._port = folder, port
        self.processes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        self.at: dict[str, Any]
        if port is not None:
            self.at = {"env_hosts_host": "127.0.0.1", "env_hosts_port": port, "env_hosts_allow_insecure": True}
            return
        if socket_dir is None:
            socket_dir = self._stack.enter_context(socket_folder())
        self._socket_dir = socket_dir
        self.at = {"socket_dir": str(socket_dir)}

    def endpoint(self, slot: int = 0) -> str:
        """Return the address at which the worker in `slot` listens."""
        if self._port is not None:
            return f"tcp://127.0.0.1:{self._port + slot}"
        return endpoint_of(self._socket_dir, f"envs-{slot}")

    def start(
        self, env: str, num_envs: int, *sets: str, slot: int = 0, to: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one for the worker in `slot`, or for that at the endpoint `to`."""
        command = [sys.executable, "-m", "headrace.deploy", "env-host", "--env", env, "--num-envs", str(num_envs)]
        command += ["--connect", to or self.endpoint(slot)]
        for assignment in ("sampling.envs_per_process=2", *sets):
            command += ["--set", assignment]
        with self.log(len(self.processes)).open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def log(self, number: int) -> Path:
        """Where the nth writes."""
        return self._folder / f"env-host-{number}.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
            for process in self.processes:
                process.wait(100)


class Cable:
    """A way to `port`, at `self.port`, which can be pulled: connections are reset, and what is in them is lost."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", free_port()))
        self.port = int(self._listener.getsockname()[1])
        self._peers: dict[socket.socket, socket.socket] = {}
        self._wake, self._woken = os.pipe()
        self.pulled = 0
        self.carried = 0
        """Bytes, both ways."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def pull(self) -> None:
        os.write(self._woken, b"p")

    def close(self) -> None:
        os.write(self._woken, b"q")
        self._thread.join()
        self._reset_all()
        self._listener.close()
        os.close(self._wake)
        os.close(self._woken)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._wake, self._listener, *self._peers], [], [])
            if self._wake in ready:
                if os.read(self._wake, 1) == b"q":
                    return
                self.pulled += bool(self._peers)
                self._reset_all()
                continue
            for sock in ready:
                if sock is self._listener:
                    self._connect()
                elif sock in self._peers:
                    self._carry(sock)

    def _connect(self) -> None:
        ours, _ = self._listener.accept()
        try:
            theirs = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            ours.close()
            return
        self._peers |= {ours: theirs, theirs: ours}

    def _carry(self, sock: Any) -> None:
        try:
            data = sock.recv(1 << 16)
            self._peers[sock].sendall(data)
        except OSError:
            data = b""
        self.carried += len(data)
        if not data:
            other = self._peers.pop(sock)
            del self._peers[other]
            sock.close()
            other.close()

    def _reset_all(self) -> None:
        for sock in self._peers:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        self._peers.clear()


@contextmanager
def cable_to(port: int) -> Iterator[Cable]:
    cable = Cable(port)
    try:
        yield cable
    finally:
        cable.close()
