"""Weights from `publish` until the last worker of this machine has loaded them into its module.

`headrace` is the publisher here, a broker, and workers' own links and receivers, each in a process. They wait, as a
worker does that has no room to sample. `shared memory` is the bare limit: the version is copied to a file in memory and
its digest taken once; each process maps the file, checks all bytes with the codec's checksum, and loads its module.

The last case has one worker that samples, `arriving` while a version of 20 MB is published each second, as a ratio to
the same worker without.

PYTHONPATH=tests python -m bench.run --only weights
PYTHONPATH=tests python -m bench.weights    # 1 GiB to 8 workers, which takes 12 GiB of memory
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from bench.pipeline import Fleet
from bench.processes import FLEET_ID, FORKED, Processes, until_terminated
from bench.table import Row, rows_of, show
from bench.turns import Turn, in_turns
from headrace.learner_stub import WeightPublisher
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config
from headrace.workers.fleet.membership import Membership
from headrace.workers.modules import actor_critic
from headrace.workers.policy.module_weights import write_weights
from support.raw_zmtp import memory_of

CASES = ((20.0, 8, 1 / 1.5), (100.0, 2, 1 / 1.5), (1.0, 2, 1 / 2), (0.1, 8, 1 / 3))
"""Megabytes of a version, workers, and the mark."""

WIDTH = 8
INTERVAL_S = 1.0

_TENSORS = 8
_DEADLINE_S = 300.0
_MEMORY = Path("/dev/shm")


def measure(seconds: float, rounds: int, cases: tuple[tuple[float, int, float], ...] = CASES) -> list[Row]:
    """Measure both arms in turns, case by case."""
    rows = []
    for megabytes, workers, mark in cases:
        nbytes = int(megabytes * 1e6)
        with (
            Processes() as processes,
            Headrace(nbytes, workers, processes) as headrace,
            SharedMemory(nbytes, workers, processes) as limit,
        ):
            turns = in_turns({"shared memory": limit, "headrace": headrace}, seconds, rounds)
        case = f"{megabytes:g} MB to {workers}"
        rows += rows_of("weights", case, "KB/s", turns, "shared memory", {"headrace": mark})
    return rows + measure_sampling(seconds, rounds)


def measure_large(versions: int, nbytes: int = 1 << 30, workers: int = 8) -> list[Row]:
    """Measure versions of a gigabyte: one arm after the other, since the machine has memory for one at a time.

    The rows of memory are the most that was seen, in copies of a version.
    """
    case, rounds, peaks = f"{nbytes >> 20} MiB to {workers}", list[dict[str, Turn]](), Counter[str]()
    for _ in range(versions):
        turns = {}
        for name, arm in (("shared memory", SharedMemory), ("headrace", Headrace)):
            with (
                Processes() as processes,
                arm(nbytes, workers, processes) as side,
                Peaks({"publisher": os.getpid(), **side.pids}) as seen,
            ):
                side.take()
                began = perf_counter()
                amounts = [side.take() for _ in range(2)]
                seconds = perf_counter() - began
            turns[name] = Turn(sum(amounts) / seconds, math.nan)
        peaks |= seen.peaks
        rounds.append(turns)
    rows = rows_of("large", case, "KB/s", rounds, "shared memory", {"headrace": 1 / 1.3})
    copies = {name: peak / nbytes for name, peak in peaks.items()}
    return rows + [Row("large", case, name, "copies", n, n, n, n) for name, n in copies.items()]


class Peaks:
    """The most memory of its own that each process took meanwhile, and that files in memory took."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.peaks = Counter[str]()
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.01):
            now = self._seen()
            for name, nbytes in now.items():
                who = "worker" if name.startswith("worker") else name
                self.peaks[who] = max(self.peaks[who], nbytes - self._before[name])

    def _seen(self) -> dict[str, int]:
        used = os.statvfs(_MEMORY)
        files = (used.f_blocks - used.f_bfree) * used.f_frsize
        return {name: memory_of(pid, "RssAnon") for name, pid in self._pids.items()} | {"files in memory": files}

    def __enter__(self) -> Self:
        self._before = self._seen()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def measure_sampling(seconds: float, rounds: int) -> list[Row]:
    """Measure a worker's sampling with and without large weights that arrive."""
    with Processes() as processes, Fleet(WIDTH, processes, workers=1, module="bench.weights:heavy_policy") as fleet:
        arms = {"without": Sampling(fleet, math.inf), "arriving": Sampling(fleet, INTERVAL_S)}
        turns = in_turns(arms, seconds, 3 * rounds)  # two or three versions arrive in a turn
    return rows_of("weights", f"{WIDTH} envs, 20 MB a second", "env steps/s", turns, "without", {"arriving": 0.97})


class Sampling:
    """One side of the comparison on a fleet that both sides use: versions are published at an interval."""

    def __init__(self, fleet: Fleet, interval_s: float) -> None:
        self.pids = fleet.pids
        self._fleet = fleet
        self._interval_s = interval_s
        self._next = math.inf

    def begin(self) -> None:
        """Let the first version be due after half an interval."""
        self._next = perf_counter() + self._interval_s / 2

    def take(self) -> int:
        """Publish when it is due, and return the number of steps in the next batch."""
        if perf_counter() >= self._next:
            self._next += self._interval_s
            self._fleet.publish()
        return self._fleet.take()

    def end(self) -> None:
        """Do nothing: backpressure stops the worker."""


def heavy_policy(spaces: Spaces) -> torch.nn.Module:
    """Build the default policy with 20 MB beside its parameters, so that acting costs what it always does."""
    policy = actor_critic(spaces)
    policy.register_buffer("ballast", torch.zeros(5_000_000))
    return policy


def state_of(nbytes: int) -> dict[str, NDArray[Any]]:
    """Return tensors of `nbytes` in all."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(size, np.float32) for name, size in _sizes(nbytes).items()}


def _sizes(nbytes: int) -> dict[str, int]:
    return {f"layer{n}": nbytes // _TENSORS // 4 for n in range(_TENSORS)}


def module_of(nbytes: int) -> torch.nn.Module:
    """Return a module that loads `state_of(nbytes)`."""
    module = torch.nn.Module()
    for name, size in _sizes(nbytes).items():
        module.register_buffer(name, torch.zeros(size))
    return module


class Publishing:
    """An arm that publishes versions and waits until each worker has loaded the newest."""

    def __init__(self, nbytes: int, workers: int) -> None:
        self.state = state_of(nbytes)
        self.workers = workers
        self._kilobytes = nbytes // 1000
        self.loaded = FORKED.Semaphore(0)
        self.pids: dict[str, int] = {}

    def begin(self) -> None:
        """Do nothing: `take` alone makes the processes work."""

    def end(self) -> None:
        """Do nothing, as `begin` does."""

    def publish(self) -> None:
        """Make `state` known to the workers."""
        raise NotImplementedError

    def take(self) -> int:
        """Publish a version, wait until all workers have loaded it, and return its size in KB."""
        self.state["layer0"][0] += 1
        self.publish()
        self.await_workers()
        return self._kilobytes

    def await_workers(self) -> None:
        """Wait until each worker has loaded once more."""
        for _ in range(self.workers):
            assert self.loaded.acquire(timeout=_DEADLINE_S), "a worker has no weights"


class Headrace(Publishing):
    """The publisher here, a broker, and links of workers."""

    def __init__(
        self,
        nbytes: int,
        workers: int,
        processes: Processes,
        hosts: Sequence[Processes] = (),
        broker: Mapping[str, Any] = MappingProxyType({}),
        keys: str = "",
    ) -> None:
        """`hosts`: each has so many workers; `processes` alone if there are none. `broker`: settings of the broker."""
        hosts = hosts or (processes,)
        super().__init__(nbytes, workers * len(hosts))
        config = build_config({"learner": {"enabled": False}, "broker": dict(broker), "keys": {"dir": keys}})
        self.pids["broker"], endpoints = processes.start_broker(config)
        told = config, endpoints.worker, nbytes, processes.folder, self.loaded
        for host, workplace in enumerate(hosts):
            self.pids |= {f"worker {host}/{n}": workplace.start(_follow, *told) for n in range(workers)}
        self._publisher = WeightPublisher(endpoints.learner, keys=keys or None)
        self.await_workers()  # each has joined

    def publish(self) -> None:
        self._publisher.publish(self.state)

    def __enter__(self) -> Headrace:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()


def _follow(config: FleetConfig, endpoint: str, nbytes: int, folder: Path, loaded: Any) -> None:
    """Run a worker that only loads weights."""
    stopping, module = until_terminated(), module_of(nbytes)
    with closing(Membership(config, endpoint, FLEET_ID, None, 0, folder)) as membership:
        loaded.release()
        while not stopping.is_set():
            membership.pump(0.05)
            newer = membership.weights.take()
            if newer is not None:
                write_weights(module, newer.arrays)
                loaded.release()


class SharedMemory(Publishing):
    """The bare limit: one file in memory, written and read once."""

    def __init__(self, nbytes: int, workers: int, processes: Processes) -> None:
        super().__init__(nbytes, workers)
        self._path = _MEMORY / f"headrace-bench-{os.getpid()}"
        self._turns = []
        for n in range(workers):
            here, there = FORKED.Pipe()
            self._turns.append(here)
            self.pids[f"reader {n}"] = processes.start(_read, self._path, nbytes, there, self.loaded)
        self.await_workers()

    def publish(self) -> None:
        self._path.unlink(missing_ok=True)
        digest, checksum = xxhash.xxh3_128(), xxhash.xxh3_64()
        with self._path.open("xb", buffering=0) as file:
            for array in self.state.values():
                digest.update(array.data)
                checksum.update(array.data)
                file.write(array.data)
        for turn in self._turns:
            turn.send((digest.hexdigest(), checksum.intdigest()))

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)


def _read(path: Path, nbytes: int, turn: Any, loaded: Any) -> None:
    """Run a process that maps each version, checks it and loads it."""
    stopping, module = until_terminated(), module_of(nbytes)
    sizes = _sizes(nbytes)
    loaded.release()
    while not stopping.is_set():
        if not turn.poll(0.5):
            continue
        _, checksum = turn.recv()
        with path.open("rb") as file:
            whole = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert xxhash.xxh3_64_intdigest(whole) == checksum
        offset = 0
        for name, tensor in module.state_dict().items():
            tensor.numpy()[...] = np.ndarray(sizes[name], np.float32, whole, offset)
            offset += tensor.numpy().nbytes
        loaded.release()


if __name__ == "__main__":
    show(measure_large(3))
