"""The whole pipeline: two workers on two cores feed a learner that only counts.

`headrace` is two worker processes, a broker process and an `EpisodeStream`, as they run in a fleet on one machine, over
Unix sockets. `curve` is the same over TCP with keys, so that each message is encrypted. The limit is two processes that
step a SyncVectorEnv with a torch policy into arrays and push those through a bare ZeroMQ proxy over Unix sockets,
without episodes, counters or promises.

PYTHONPATH=tests python -m bench.run --only pipeline
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from bench import limits
from bench.processes import FLEET_ID, FORKED, Processes
from bench.table import Row, rows_of
from bench.transport import bind_bare, made_keys, tcp_with
from bench.turns import in_turns
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config
from headrace.schemas.settings.plugins import load_object
from headrace.workers.fleet.worker import run_worker

WORKERS = 2
WIDTHS = (8, 64)
HORIZON = 64
"""Steps of each env in one message, in both arms."""

QUEUE = 8
MARKS = {64: 0.85}


def measure(seconds: float, rounds: int, widths: tuple[int, ...] = WIDTHS) -> list[Row]:
    """Measure both arms in turns, width by width."""
    rows = []
    for width in widths:
        with (
            Processes() as processes,
            Fleet(width, processes) as fleet,
            Fleet(width, processes, keys=made_keys(processes.folder)) as curve,
            Proxied(width, processes) as limit,
        ):
            turns = in_turns({"limit": limit, "headrace": fleet, "curve": curve}, seconds, rounds)
        marks = {"headrace": MARKS[width]} if width in MARKS else {}
        rows += rows_of("pipeline", f"{WORKERS} workers, {width} envs each", "env steps/s", turns, "limit", marks)
    return rows


# -- ours -------------------------------------------------------------------------------------------------------------


class Fleet:
    """Workers, broker, and the stream here. `pids` by role."""

    def __init__(
        self,
        width: int,
        processes: Processes,
        workers: int = WORKERS,
        module: str = "",
        redis_url: str | None = None,
        keys: str = "",
        env: str = limits.ENV,
        config: FleetConfig | None = None,
        run_dir: Path | None = None,
    ) -> None:
        config = config or fleet_config(width, module, keys, env)
        broker, endpoints = processes.start_broker(config, redis_url, run_dir=run_dir)
        self.pids = {"broker": broker}
        recorders = Path(tempfile.mkdtemp(dir=processes.folder))  # those of another fleet have the same slots
        for slot in range(workers):
            pid = processes.start(_work, config, endpoints.worker, slot, recorders)
            self.pids[f"worker {slot}"] = pid
        self._stream = EpisodeStream(endpoints.learner, keys=keys or None)
        self._weights = WeightPublisher(endpoints.learner, keys=keys or None)
        build: Any = load_object(config.module.build, "module.build")
        self._module = build(self._stream.spaces())
        self.publish()

    def publish(self) -> None:
        """Publish the same weights as a new version."""
        self._weights.publish(self._module.state_dict())

    def begin(self) -> None:
        """Do nothing: backpressure alone starts and stops the workers."""

    def take(self) -> int:
        """Return the number of steps in the next batch."""
        return self.batch().steps

    def batch(self) -> ChunkBatch:
        """Return the next batch."""
        batch = self._stream.next(timeout_s=60.0)
        assert batch is not None, "no batch for a minute"
        return batch

    def end(self) -> None:
        """See `begin`."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._weights.close()
        self._stream.close()


def fleet_config(width: int, module: str = "", keys: str = "", env: str = limits.ENV) -> FleetConfig:
    """Return the config for one's own learner, with `width` envs and windows as long as the bare sockets' queues.

    `module` builds the policy, if it is not the default one. `keys` is the folder of the fleet's keys, if it has any:
    then it serves by TCP.
    """
    sampling = {"env": env, "num_envs": width, "rollout_fragment_length": HORIZON, "seed": 0}
    policy = {"module": {"build": module}} if module else {}
    own = {
        "sampling": sampling,
        "learner": {"enabled": False},
        "worker": {"window_batches": QUEUE},
    }
    return build_config({**own, **policy, **tcp_with(keys)})


def _work(config: FleetConfig, endpoint: str, slot: int, folder: Any) -> None:
    run_worker(config, endpoint=endpoint, fleet_id=FLEET_ID, slot=slot, incarnation=0, recorder_dir=folder)


# -- the limit --------------------------------------------------------------------------------------------------------


class Proxied:
    """Samplers that push whole arrays through `zmq.proxy`, and PULL here.

    Each turn starts and stops them explicitly, because a proxy whose output is full spins.
    """

    def __init__(self, width: int, processes: Processes) -> None:
        self._context = zmq.Context()
        self._pull = _short(self._context, zmq.PULL)
        self._pull.rcvtimeo = 60_000
        here = bind_bare(self._pull, processes.folder)
        told = FORKED.SimpleQueue()
        self._turn = FORKED.Event()
        self.pids = {"proxy": processes.start(_proxy, told, here, processes.folder)}
        endpoint = told.get()
        for seed in range(WORKERS):
            self.pids[f"sampler {seed}"] = processes.start(_sample, self._turn, endpoint, width, seed)

    def begin(self) -> None:
        """Let the samplers run."""
        self._turn.set()

    def take(self) -> int:
        """Return the number of steps in the next message."""
        steps, *_ = self._pull.recv_multipart(copy=False)
        return int(steps.bytes)

    def end(self) -> None:
        """Stop the samplers and empty all queues."""
        self._turn.clear()
        while self._pull.poll(500):
            self.take()

    def __enter__(self) -> Proxied:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


def _short(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    """Return a socket with short queues, because queued messages were not sampled in this turn."""
    socket = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = QUEUE
    socket.linger = 0
    return socket


def _proxy(told: Any, there: str, folder: Path) -> None:
    context = zmq.Context()
    pull, push = _short(context, zmq.PULL), _short(context, zmq.PUSH)
    told.put(bind_bare(pull, folder))
    push.connect(there)
    zmq.proxy(pull, push)


def _sample(turn: Any, endpoint: str, width: int, seed: int) -> None:
    """Run limit 2 and send its arrays every `HORIZON` steps."""
    torch.set_num_threads(1)
    push = _short(zmq.Context(), zmq.PUSH)
    push.connect(endpoint)
    env, policy = limits.sync_vector(width), limits.TorchPolicy()
    obs, _ = env.reset(seed=seed)
    while turn.wait():
        record = limits.arrays(width, HORIZON)
        for t in range(HORIZON):
            obs = limits.record_step(env, policy, obs, record, t)
        steps = width * HORIZON - limits.ends_in(record)
        push.send_multipart([b"%d" % steps, *map(np.ascontiguousarray, record.values())], copy=False)
