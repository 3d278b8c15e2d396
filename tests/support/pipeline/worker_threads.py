"""A worker in a thread of the test, and what is asked of its books."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.rollouts.module import build_module
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import HeadraceError
from headrace.schemas.messages import Obituary, SupervisorHello
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.socket_folder import endpoint_of, make_socket_folder
from headrace.schemas.settings.config import ModuleSection
from headrace.schemas.settings.config_loading import build_config
from headrace.workers.fleet import worker as worker_module
from support.pipeline.delivery import FLEET, BrokerThread, LoopThread, RawPeer
from support.waiting import wait_until

SAMPLING: dict[str, Any] = {"env": "CartPole-v1", "num_envs": 2, "rollout_fragment_length": 16, "seed": 1}
AT_RANDOM = {"sampling": SAMPLING, "worker": {"random_actions_before_weights": True}}


def in_run(run_dir: Path, kind: str) -> tuple[dict[str, Any], str]:
    """The section [fleet] of a worker with its sockets in `run_dir`, and the address of that in slot 0 for `kind`."""
    return {"run_dir": str(run_dir)}, endpoint_of(make_socket_folder(run_dir), f"{kind}-0")


class WorkerThread(LoopThread):
    """`run_worker` in a thread, stopped by an event instead of SIGTERM."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        endpoint: str,
        recorders: Path,
        sections: dict[str, Any],
        place: FleetPlace | None = None,
    ) -> None:
        super().__init__("worker")
        self.error: HeadraceError | None = None
        monkeypatch.setattr(worker_module, "DRAIN_TIMEOUT_S", 5.0)
        monkeypatch.setattr(worker_module, "stop_event", lambda: nullcontext(self.stopping))
        self._arguments: dict[str, Any] = {"endpoint": endpoint, "fleet_id": FLEET, "recorder_dir": recorders}
        self._arguments["place"] = place
        self._config = build_config(sections)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise what has ended it, if something has."""
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            worker_module.run_worker(self._config, slot=0, incarnation=1, **self._arguments)
        except HeadraceError as error:
            self.error = error


def drain(stream: EpisodeStream, see: Callable[[ChunkBatch], object]) -> None:
    """Show `see` each batch that is there."""
    while (batch := stream.next(0.3)) is not None:
        see(batch)


def closed_row(broker: BrokerThread, incarnation: int = 1, *, take: Callable[[], object] = lambda: None) -> LedgerRow:
    """The row of slot 0, once its books are closed and nothing is held; it must add up.

    `take` is called meanwhile: have it take from the stream what the broker may hold. A drain that ended before may
    have come too early for the worker's last batch, which nobody would take then.
    """

    def find() -> LedgerRow | None:
        take()
        row = broker.rows().get((0, incarnation))
        return row if row is not None and row.closed and row.held == (0, 0) else None

    wait_until(find, f"closed books of incarnation {incarnation}")
    row = broker.rows()[(0, incarnation)]
    assert not list(row.problems())
    return row


def constant_value(spaces: Spaces, value: float) -> dict[str, NDArray[Any]]:
    """Weights under which the policy's value is `value` everywhere, and its actions are even."""
    state = build_module(ModuleSection(), spaces).state_dict()
    arrays = {name: np.zeros(tuple(tensor.shape), np.float32) for name, tensor in state.items()}
    arrays["head.bias"][-1] = value
    return arrays


def report_death(broker: BrokerThread, run_dir: Path, incarnation: int, reason: str) -> None:
    """What a supervisor does: read the recorder, and tell the broker until it answers."""
    reading = read_recorder(run_dir / f"worker-0-{incarnation}.rec")
    assert reading is not None
    words = Obituary(
        slot=0,
        incarnation=incarnation,
        totals=reading.totals,
        settled=reading.settled,
        window=reading.window,
        reason=reason,
    )
    with RawPeer(broker.endpoints.worker) as peer:
        peer.send(SupervisorHello(fleet_id=FLEET, token="s").frames())
        peer.send(words.frames())
        wait_until(lambda: (row := broker.rows().get((0, incarnation))) is not None and row.closed, "closed books")


def accepted(broker: BrokerThread, incarnation: int) -> int:
    row = broker.rows().get((0, incarnation))
    return row.totals.seq if row is not None else 0
