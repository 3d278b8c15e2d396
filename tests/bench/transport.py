"""Transport alone: prebuilt batches from one producer through one broker to one consumer, each a process.

`headrace` is the worker's own shipping (encode, checksum, recorder, window), the broker, and `EpisodeStream` with
automatic commits, over Unix sockets; `curve` is the same over TCP on loopback with keys, so that each message is
encrypted twice and decrypted twice. `forwarding` is a bare loop in Python that passes the very same frames on over Unix
sockets, without any promise, and `forward tcp` is that loop over TCP on loopback. All send the same messages.

PYTHONPATH=tests python -m bench.run --only transport
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from bench.processes import FLEET_ID, FORKED, Processes, until_terminated
from bench.table import Row, rows_of
from bench.turns import in_turns
from headrace.deploy.run.key_pairs import make_keys
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.chunks.chunk import CHUNK_TABLE
from headrace.schemas.chunks.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.fleet.membership import Membership
from headrace.workers.fleet.worker import Worker
from headrace.workers.metrics.totals import RunnerTotals

STEPS = 64
DISTINCT = 4
"""Number of different batches that are sent in a cycle."""


@dataclass(frozen=True, slots=True)
class Load:
    """The content of one message."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: int
    window: int
    """Messages in the worker's window, and that may wait at each bare socket: few large ones, which then stay in the
    processor's cache, or many small ones, so that both arms are held up by work and not by waiting."""
    mark: float | None

    @property
    def case(self) -> str:
        return f"{self.name}, {self.chunks} a message"

    @property
    def spaces(self) -> Spaces:
        return Spaces(observation=Box(shape=self.shape, dtype=self.dtype), action=Discrete(n=2))

    def batch(self, seed: int) -> ChunkBatch:
        """Return chunks of `STEPS` steps, one for each env, as a worker cuts them."""
        rng = np.random.default_rng(seed)
        steps = self.chunks * STEPS
        obs = rng.integers(0, 255, ((STEPS + 1) * self.chunks, *self.shape)).astype(self.dtype)
        table = np.zeros(self.chunks, CHUNK_TABLE)
        table["length"], table["env_index"] = STEPS, np.arange(self.chunks)
        columns = {
            "obs": obs,
            "actions": rng.integers(0, 2, steps),
            "rewards": np.ones(steps),
            "weights_seq": np.ones(steps, np.int64),
            "logp": rng.standard_normal(steps, np.float32),
            "values": rng.standard_normal(steps, np.float32),
        }
        spaces = self.spaces
        return ChunkBatch(table, columns, spaces.observation, spaces.action)


LOADS = (
    Load("small (64 CartPole steps)", (4,), "<f4", 64, 64, 0.5),
    Load("small (64 CartPole steps)", (4,), "<f4", 16, 64, None),
    Load("pixel (64 x 84x84x4)", (84, 84, 4), "|u1", 1, 8, 0.7),
    Load("pixel (64 x 84x84x4)", (84, 84, 4), "|u1", 4, 4, 0.7),
)


def measure(seconds: float, rounds: int, loads: tuple[Load, ...] = LOADS) -> list[Row]:
    """Measure all arms in turns, load by load."""
    rows = []
    for load in loads:
        with (
            Processes() as processes,
            Headrace(load, processes) as headrace,
            Headrace(load, processes, made_keys(processes.folder)) as curve,
            Forwarding(load, processes, processes.folder) as bare,
            Forwarding(load, processes, None) as bare_tcp,
        ):
            arms = {"forwarding": bare, "forward tcp": bare_tcp, "headrace": headrace, "curve": curve}
            turns = in_turns(arms, seconds, rounds)
        marks = {"headrace": load.mark} if load.mark is not None else {}
        rows += rows_of("transport", load.case, "chunks/s", turns, "forwarding", marks)
    return rows


# -- with all guarantees ----------------------------------------------------------------------------------------------


class Headrace:
    """A worker that ships prebuilt batches, a broker, and the stream here; with keys, over TCP."""

    def __init__(self, load: Load, processes: Processes, keys: str = "") -> None:
        settings = {"learner": {"enabled": False}, "worker": {"window_batches": load.window}}
        config = build_config({**settings, **tcp_with(keys)})
        broker, endpoints = processes.start_broker(config)
        # Of its own: workers of two fleets with the same slot would write to one file.
        recorders = Path(tempfile.mkdtemp(dir=processes.folder))
        worker = processes.start(_ship, config, endpoints.worker, load, recorders)
        self.pids = {"broker": broker, "worker": worker}
        self._stream = EpisodeStream(endpoints.learner, keys=keys or None)
        self._stream.spaces()

    def begin(self) -> None:
        """Do nothing: backpressure alone starts and stops the producer."""

    def take(self) -> int:
        """Read each column of the next batch; return its number of chunks."""
        batch = self._stream.next(timeout_s=30.0)
        assert batch is not None, "no batch for 30 s"
        for column in batch.arrays.values():
            column[-1]
        return len(batch)

    def end(self) -> None:
        """Do nothing, as `begin` does."""

    def __enter__(self) -> Headrace:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def made_keys(folder: Path) -> str:
    """Make keys in a folder below `folder`; return it."""
    make_keys(folder / "keys")
    return str(folder / "keys")


def tcp_with(keys: str) -> dict[str, dict[str, str]]:
    """Return the settings of a broker by TCP with keys in this folder; for "" none: it serves by Unix sockets."""
    return {"broker": {"host": "127.0.0.1"}, "keys": {"dir": keys}} if keys else {}


def _ship(config: FleetConfig, endpoint: str, load: Load, folder: Any) -> None:
    """Run the worker process: a worker without envs and policy."""
    stopping = until_terminated()
    with closing(Membership(config, endpoint, FLEET_ID, None, 0, folder)) as membership:
        runner: Any = PrebuiltRunner(load)
        worker = Worker(config, membership, runner)
        worker.introduce()
        while not stopping.is_set():
            if worker.wait_for_room(stopping):
                worker.ship(worker.sample(stopping))


class PrebuiltRunner:
    """Takes the sampler's place and returns a few batches in a cycle."""

    weights_version = (1, 1)
    envs_lost = 0
    tasks_refused = ""
    env_hosts = None
    callbacks = CallbackList((), dict)
    config = EnvRunnerConfig()

    def __init__(self, load: Load) -> None:
        self.totals = RunnerTotals()
        self.module_spaces = {DEFAULT_MODULE_ID: load.spaces}
        self._batches = [load.batch(seed) for seed in range(DISTINCT)]

    def sample_fragment(
        self, on_poll: Callable[[], None], random_actions: bool = False, most_steps: int | None = None
    ) -> ChunkBatch:
        batch = self._batches[self.totals.delivered_chunks // len(self._batches[0]) % DISTINCT]
        self.totals.stepped += batch.steps
        self.totals.delivered += batch.steps
        self.totals.delivered_chunks += len(batch)
        on_poll()
        return batch

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        return {}

    def take_finished_episodes(self) -> list[tuple[float, int]]:
        return []

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Count batches only."""

    def get_counters(self) -> dict[str, Any]:
        return {}

    def time_by_part(self) -> dict[str, float]:
        return {}

    def get_logged_metrics(self) -> dict[str, Any]:
        return {}


# -- with none --------------------------------------------------------------------------------------------------------


class Forwarding:
    """PUSH, a loop that forwards, and PULL here: over Unix sockets in `folder`, or without one over TCP."""

    def __init__(self, load: Load, processes: Processes, folder: Path | None) -> None:
        self._chunks = load.chunks
        self._context = zmq.Context()
        self._pull = bare_socket(self._context, zmq.PULL, load)
        self._pull.rcvtimeo = 30_000
        here = bind_bare(self._pull, folder)
        told = FORKED.SimpleQueue()
        self.pids = {"broker": processes.start(forward, told, here, load, folder)}
        self.pids["worker"] = processes.start(_push, told.get(), load)

    def begin(self) -> None:
        """Do nothing: backpressure alone starts and stops the producer."""

    def take(self) -> int:
        """Return the number of chunks in the next message."""
        self._pull.recv_multipart(copy=False)
        return self._chunks

    def end(self) -> None:
        """Do nothing, as `begin` does."""

    def __enter__(self) -> Forwarding:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


def bare_socket(context: zmq.Context[Any], kind: int, load: Load) -> zmq.Socket[Any]:
    """Return a socket with short queues, so that a sender waits for its receiver."""
    socket = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = load.window
    socket.linger = 0
    return socket


def bind_bare(socket: zmq.Socket[Any], folder: Path | None) -> str:
    """Bind to a new Unix socket in `folder`, or without one to a free port on loopback. Return the address."""
    if folder is None:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    endpoint = f"ipc://{folder}/bare-{secrets.token_hex(4)}"
    socket.bind(endpoint)
    return endpoint


def forward(told: Any, there: str, load: Load, folder: Path | None) -> None:
    """Run the bare broker: bind, report the address, and forward frames without a copy."""
    context = zmq.Context()
    pull, push = bare_socket(context, zmq.PULL, load), bare_socket(context, zmq.PUSH, load)
    told.put(bind_bare(pull, folder))
    push.connect(there)
    while True:
        push.send_multipart(pull.recv_multipart(copy=False), copy=False)


def _push(endpoint: str, load: Load) -> None:
    """Run the bare producer: encode frames once and send them in a loop."""
    push = bare_socket(zmq.Context(), zmq.PUSH, load)
    push.connect(endpoint)
    messages = [_encoded(load, seed) for seed in range(DISTINCT)]
    while True:
        for frames in messages:
            push.send_multipart(frames, copy=False)


def _encoded(load: Load, seed: int) -> list[Any]:
    batch = load.batch(seed)
    header = BatchHeader(
        fleet_id=FLEET_ID,
        slot=0,
        incarnation=1,
        seq=1,
        steps=batch.steps,
        chunks=len(batch),
        totals=WorkerTotals(),
    )
    return encode_batch(batch, header)
