"""A Ray of three raylets on this machine, in a process of its own: `python -m support.fleets.ray_cluster FOLDER`.

It says its address and its raylets' pids as JSON, then takes commands, a line each, and answers with a JSON line:

- `actors`: names of all actors.
- `kill NAME`: kills an actor for good, as `ray.kill` does by default.

It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.waiting import TIMEOUT_S

FAST_DETECTION = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
}
"""A node that is gone is noticed within two seconds. By Ray's defaults it takes some 15 s."""
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
_NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}
"""A node that takes two workers, and starts as many idle processes for them. The head takes none."""


class RayCluster:
    """The process, seen from a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        told = self._read()
        self.address: str = told["address"]
        self.others: list[int] = told["raylets"][1:]
        """Pids of the raylets beside the head's."""

    def actor_on(self, raylet: int) -> str:
        """The name of the only actor whose group of workers runs on the node of this raylet."""
        (name,) = (name for name in self.actors() if _is_on(f"{name[name.index('worker-') :]}.json", raylet))
        return name

    def actors(self) -> list[str]:
        """The names of all actors."""
        return list(self._ask("actors"))

    def kill_actor(self, name: str) -> None:
        """Kill an actor for good."""
        self._ask(f"kill {name}")

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process of the Ray cluster has ended"
        return json.loads(line)


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Run a cluster whose files are in `folder`, which needs a short path: Ray has sockets there."""
    command = [sys.executable, "-m", "support.fleets.ray_cluster", str(folder)]
    environment = {**os.environ, **ENVIRONMENT, "TMPDIR": str(folder)}
    (folder / "ray").mkdir()  # Ray notes its newest cluster there, and does not make it
    with (folder / "cluster.log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
    try:
        yield RayCluster(process)
    finally:
        process.communicate(timeout=TIMEOUT_S)


def processes_of(folder: Path) -> list[str]:
    """The command lines of all processes that name the folder."""
    lines = (_command_line(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [line for line in lines if str(folder) in line]


def _is_on(word: str, raylet: int) -> bool:
    """Return whether a process with this word in its command line has this raylet in its environment."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                word in _command_line(int(path.name))
                and b"RAY_RAYLET_PID=%d\0" % raylet in path.joinpath("environ").read_bytes()
            ):
                return True
    return False


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def main(folder: str) -> None:
    """Serve one cluster."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray writes to stdout
    import ray
    from ray.cluster_utils import Cluster

    head = {**_NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": FAST_DETECTION, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.head_node, *(cluster.add_node(**_NODE) for _ in range(2))]
    ray.init(address=cluster.address, namespace="headrace", log_to_driver=False)
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), file=answers)
    for line in sys.stdin:
        verb, _, name = line.strip().partition(" ")
        if verb == "kill":
            ray.kill(ray.get_actor(name))
        print(json.dumps(ray.util.list_named_actors()), file=answers)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1])
