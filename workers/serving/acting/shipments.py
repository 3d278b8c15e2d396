"""What a client that acts by itself brings to its worker: each batch once, in messages that fit, and what is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.schemas.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.errors import InfosTooLargeError, UnreachableError
from headrace.schemas.ledger import Discard, WorkerTotals
from headrace.schemas.serving_errors import MessageTooLargeError, NotYetError, UnknownSessionError
from headrace.schemas.serving_messages import MOST_EPISODES, ChunkShipment
from headrace.schemas.wire import Buffer
from headrace.workers.fleet.shipping import Cut, batches_of
from headrace.workers.runner.multi_agent_env_runner import MultiAgentEnvRunner
from headrace.workers.runner.single_agent_env_runner import SingleAgentEnvRunner
from headrace.workers.serving.client import PolicyClient

AnyRunner = SingleAgentEnvRunner | MultiAgentEnvRunner
_ONE_TRY_S = 5.0
"""How long one request is waited for; a client that closes waits no longer for a server that is gone."""
_HEAD_BYTES = 2560
"""Room in a message for what stands before the chunks."""


class Shipments:
    """Those of `runner` in the session of `link`, one after another.

    What the server has not said to have taken when it dies or forgets the session is lost, and told to the next one as
    `Discard.UNSHIPPED`. (A worker that is killed between taking a shipment and saying so has it in its own books too.)
    """

    def __init__(self, link: PolicyClient, runner: AnyRunner, closing: threading.Event, timeout_s: float) -> None:
        self._link = link
        self._runner = runner
        self._closing = closing
        self._timeout_s = timeout_s
        self._number = 0
        self._unshipped = 0
        """Steps that were cut, and lost."""
        self._told: dict[str, int] = {}
        """Discarded steps that a server knows of."""
        self._untrained: list[tuple[float, int]] = []
        """Episodes that are to be told next."""
        self._episodes: list[tuple[float, int]] = []
        """Likewise, of several agents that are trained on."""
        self._waiting: list[tuple[float, int]] = []
        """For their turn."""
        self._told_env_steps: tuple[int, ...] = (0, 0, 0)

    @property
    def room(self) -> int:
        """Bytes that a batch may have as a message."""
        return self._link.max_message_bytes - _HEAD_BYTES

    @property
    def lost_steps(self) -> int:
        """All that no server has had."""
        return self._unshipped + self._runner.totals.discarded.get(Discard.UNSHIPPED, 0)

    def start_over(self) -> None:
        """The session is another, in which nothing was shipped yet."""
        self._number = 0

    def lose(self, cut: Cut) -> None:
        """No server will ever have this."""
        self._unshipped += cut.steps

    def ship(self, cut: Cut) -> None:
        """Returns when the server has all of it in its stream: while nobody trains, nobody acts.

        Raises `UnknownSessionError` when the session has ended, and `MessageTooLargeError` for a chunk that fits no
        message; what was not taken of the batch is lost then. Others end the client: `UnreachableError` and
        `NotYetError` after `timeout_s` or when it closes, and what a server refuses chunks with.
        """
        left = cut.steps
        try:
            for batch in batches_of(cut):
                for part in self._parts(batch):
                    self._send(encode_batch(part, self._header(part)))
                    left -= part.steps
            self.tell()
        except (UnknownSessionError, MessageTooLargeError):
            self._unshipped += left
            raise

    def tell(self) -> None:
        """Of steps and episodes that come in no batch, as far as it was not told yet. Raises what `ship` does."""
        while self._discarded() or self._take_untrained() or self._take_episodes() or any(self._env_steps()):
            self._send([])

    def _parts(self, batch: ChunkBatch) -> Iterator[ChunkBatch]:
        """The batch, or halves of it, or halves of those, such that each fits a message."""
        excess = self._excess(batch)
        if not excess:
            yield batch
            return
        if len(batch) == 1:
            raise MessageTooLargeError(excess)
        for half in batch.halves():
            yield from self._parts(half)

    def _excess(self, batch: ChunkBatch) -> str:
        """Why a message does not take it; empty where it does."""
        try:
            size = sum(map(len, encode_batch(batch, self._header(batch))))
        except InfosTooLargeError as error:
            return str(error)
        if size <= self.room:
            return ""
        return (
            f"a chunk of {batch.steps} steps makes a message of {size} bytes, and the server takes "
            f"serving.max_message_bytes = {self._link.max_message_bytes}: raise that, or lower "
            "sampling.rollout_fragment_length"
        )

    def _send(self, frames: list[Buffer]) -> None:
        discarded, env_steps = self._discarded(), self._env_steps()
        counts = {"discarded": discarded, "untrained": self._take_untrained(), "episodes": self._take_episodes()}
        arrays = {"batch": np.frombuffer(b"".join(frames), np.uint8)} if frames else {}
        sizes = [len(frame) for frame in frames]
        self._ask(arrays, number=self._number + 1, frame_sizes=sizes, env_steps=env_steps, **counts)
        self._number += 1
        self._untrained, self._episodes = [], []
        self._told_env_steps = tuple(map(sum, zip(self._told_env_steps, env_steps, strict=True)))
        for reason, steps in discarded.items():
            self._told[reason] = self._told.get(reason, 0) + steps

    def _ask(self, arrays: dict[str, Any], **fields: Any) -> None:
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                self._link.ask(ChunkShipment, arrays, timeout_s=_ONE_TRY_S, **fields)
                return
            except (NotYetError, UnreachableError):
                if self._closing.wait(0.1) or time.monotonic() >= until:
                    raise

    def _discarded(self) -> dict[str, int]:
        """Steps by reason that no server knows of."""
        reasons = self._runner.totals.discarded | {Discard.UNSHIPPED.value: self.lost_steps}
        told = self._told
        return {reason: steps - told.get(reason, 0) for reason, steps in reasons.items() if steps > told.get(reason, 0)}

    def _take_untrained(self) -> list[tuple[float, int]]:
        self._untrained += self._runner.take_untrained_episodes(MOST_EPISODES - len(self._untrained))
        return self._untrained

    def _take_episodes(self) -> list[tuple[float, int]]:
        """Those of several agents: of one, the chunks tell."""
        if isinstance(self._runner, MultiAgentEnvRunner):
            self._waiting += self._runner.take_finished_episodes()
            free = MOST_EPISODES - len(self._episodes)
            self._episodes, self._waiting = self._episodes + self._waiting[:free], self._waiting[free:]
        return self._episodes

    def _env_steps(self) -> tuple[int, ...]:
        """Taken, delivered, discarded, since the server was told last; nothing where each agent step is one."""
        if not isinstance(self._runner, MultiAgentEnvRunner):
            return (0, 0, 0)
        t = self._runner.totals
        now = t.env_steps, t.env_steps_delivered, t.env_steps_discarded
        return tuple(steps - told for steps, told in zip(now, self._told_env_steps, strict=True))

    def _header(self, batch: ChunkBatch) -> BatchHeader:
        return BatchHeader(
            fleet_id="",
            slot=0,
            incarnation=0,
            seq=self._number + 1,
            steps=batch.steps,
            chunks=len(batch),
            learner_epoch=batch.learner_epoch,
            weights_digest=batch.weights_digest,
            agents=list(batch.agents),
            modules=list(batch.modules),
            reasons=list(batch.reasons),
            totals=WorkerTotals(),
        )
