"""Ships the chunks of a client that acts by itself: each batch once, in messages that fit, with lost steps counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.schemas.accounts.ledger import Discard, WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.errors import HeadraceError, InfosTooLargeError, UnreachableError
from headrace.schemas.errors.serving import MessageTooLargeError, UnknownSessionError, code_of
from headrace.schemas.frames.wire import Buffer
from headrace.workers.agents.multi_agent_env_runner import MultiAgentEnvRunner
from headrace.workers.runner.single_agent_env_runner import AnyRunner
from headrace.workers.sampling.module_batches import Cut, batches_of
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import MOST_EPISODES, ChunkShipment

_ONE_TRY_S = 5.0
"""Seconds that one request may take. A client that closes waits no longer for a server that is gone."""
_HEAD_BYTES = 2560
"""The part of a message that is kept for what precedes the chunks."""


class Shipments:
    """Ships what `runner` has sampled, one shipment after another, in the session of `link`.

    Steps are lost if the server dies or ends the session before it acknowledges them. They are reported to the next
    session as `Discard.UNSHIPPED`. A worker that is killed between taking a shipment and its acknowledgement has
    counted it, too.
    """

    def __init__(self, link: PolicyClient, runner: AnyRunner, closing: threading.Event, timeout_s: float) -> None:
        self._link = link
        self._runner = runner
        self._closing = closing
        self._timeout_s = timeout_s
        self._number = 0
        self._unshipped = 0
        """Steps that were cut and then lost."""
        self._reported: dict[str, int] = {}
        """Discarded steps by reason that were reported to a server."""
        self._untrained: list[tuple[float, int]] = []
        """Untrained episodes for the next shipment."""
        self._episodes: list[tuple[float, int]] = []
        """Trained episodes of several agents for the next shipment."""
        self._reported_env_steps: tuple[int, ...] = (0, 0, 0)
        self._reported_outside = 0

    @property
    def room(self) -> int:
        """The largest size of an encoded batch."""
        return self._link.max_message_bytes - _HEAD_BYTES

    @property
    def lost_steps(self) -> int:
        """All steps that no server has taken."""
        return self._unshipped + self._runner.totals.discarded.get(Discard.UNSHIPPED, 0)

    def start_over(self) -> None:
        """Begin to number shipments from 1, for a new session."""
        self._number = 0

    def lose(self, cut: Cut) -> None:
        """Count the steps of a fragment as lost."""
        self._unshipped += cut.steps

    def ship(self, cut: Cut) -> None:
        """Ship a fragment. Blocks until the server's stream has all of it.

        Raises `UnknownSessionError` when the session has ended, and `MessageTooLargeError` for a chunk that fits no
        message. Then the rest of the batch is lost. Other errors end the client: `UnreachableError` and "not_yet"
        after `timeout_s` or at `close`, and the errors with which a server refuses chunks.
        """
        left = cut.steps
        try:
            for batch in batches_of(cut):
                for steps, frames in self._messages(batch):
                    self._send(frames)
                    left -= steps
            self.report()
        except (UnknownSessionError, MessageTooLargeError):
            self._unshipped += left
            raise

    def report(self) -> None:
        """Report steps and episodes that are in no batch and were not reported yet. Raises what `ship` raises."""
        while self._discarded() or self._take_untrained() or self._take_episodes() or any(self._env_steps()):
            self._send([])

    def _messages(self, batch: ChunkBatch) -> Iterator[tuple[int, list[Buffer]]]:
        """Yield steps and frames of the batch, or of parts of it that each fit a message."""
        try:
            frames = encode_batch(batch, self._header(batch))
            size = sum(map(len, frames))
            excess, why = (
                size - self.room,
                (
                    f"a chunk of {batch.steps} steps makes a message of {size} bytes, and the server takes "
                    f"serving.max_message_bytes = {self._link.max_message_bytes}: raise that, or lower "
                    "sampling.rollout_fragment_length"
                ),
            )
            if excess <= 0:
                yield batch.steps, frames
                return
        except InfosTooLargeError as error:
            excess, why = error.nbytes - error.limit, str(error)
        parts, left_out = batch.smaller(excess)
        if not parts:
            raise MessageTooLargeError(why)
        self._runner.totals.note_left_out(left_out)
        for part in parts:
            yield from self._messages(part)

    def _send(self, frames: list[Buffer]) -> None:
        discarded, env_steps = self._discarded(), self._env_steps()
        counts = {"discarded": discarded, "untrained": self._take_untrained(), "episodes": self._take_episodes()}
        arrays = {"batch": np.frombuffer(b"".join(frames), np.uint8)} if frames else {}
        sizes = [len(frame) for frame in frames]
        outside = self._runner.totals.observations_outside - self._reported_outside
        self._ask(arrays, number=self._number + 1, frame_sizes=sizes, env_steps=env_steps, outside=outside, **counts)
        self._reported_outside += outside
        self._number += 1
        self._untrained, self._episodes = [], []
        self._reported_env_steps = tuple(map(sum, zip(self._reported_env_steps, env_steps, strict=True)))
        for reason, steps in discarded.items():
            self._reported[reason] = self._reported.get(reason, 0) + steps

    def _ask(self, arrays: dict[str, Any], **fields: Any) -> None:
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                self._link.ask(ChunkShipment, arrays, timeout_s=_ONE_TRY_S, **fields)
                return
            except HeadraceError as error:
                may_repeat = isinstance(error, UnreachableError) or code_of(error) == "not_yet"
                if not may_repeat or self._closing.wait(0.1) or time.monotonic() >= until:
                    raise

    def _discarded(self) -> dict[str, int]:
        """Return the discarded steps by reason that were not reported yet."""
        reasons = self._runner.totals.discarded | {Discard.UNSHIPPED.value: self.lost_steps}
        reported = self._reported
        return {
            reason: steps - reported.get(reason, 0)
            for reason, steps in reasons.items()
            if steps > reported.get(reason, 0)
        }

    def _take_untrained(self) -> list[tuple[float, int]]:
        self._untrained += self._runner.take_untrained_episodes(MOST_EPISODES - len(self._untrained))
        return self._untrained

    def _take_episodes(self) -> list[tuple[float, int]]:
        """Return finished episodes of several agents. With one agent, the chunks tell its episodes."""
        if isinstance(self._runner, MultiAgentEnvRunner):
            self._episodes += self._runner.take_finished_episodes(MOST_EPISODES - len(self._episodes))
        return self._episodes

    def _env_steps(self) -> tuple[int, ...]:
        """Return the env steps taken, delivered and discarded since the last report; zeros with one agent."""
        if not isinstance(self._runner, MultiAgentEnvRunner):
            return (0, 0, 0)
        t = self._runner.totals
        now = t.env_steps, t.env_steps_delivered, t.env_steps_discarded
        return tuple(steps - reported for steps, reported in zip(now, self._reported_env_steps, strict=True))

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
