"""The channel between a worker and its clients that act by themselves: weights go out, chunks come in.

clients, in the dispatcher's loop                     the worker, between polls
weights                      ◀── newest version ───   offer
accept, lost ── chunks, end markers, in order ───▶    take ── (into the stream) ── delivery.done
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.basics.bounds import Version
from headrace.schemas.chunks.batch import ChunkBatch, read_batch_header
from headrace.schemas.chunks.batch_reader import BatchReader
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.chunks.open_episodes import stops
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors.serving import ServingError
from headrace.schemas.frames.wire import Buffer, MessageKind, WireLimits, decode_header, frames_of
from headrace.schemas.messages.weights import Arrays, encode_weights
from headrace.schemas.messages.weights_messages import PIECE_BYTES
from headrace.workers.policy.batch_columns import PolicyColumns
from headrace.workers.runner.client_chunks import ClientChunks
from headrace.workers.serving.serving_messages import ChunkShipment, ClientPart, ClientPull
from headrace.workers.serving.session_records import Reply

_PartId = tuple[int, int, str, str]
"""An agent's part of an episode: the two words of the episode's id, agent, module."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Chunks and counts for the worker's stream and totals.

    The worker calls `done` when the batch, if there is one, has its number in the stream.
    """

    taken: ClientChunks
    done: Callable[[], None]


class ActingChannel:
    """Any thread may call; nothing blocks. Before `open` and after `end` no chunks are taken."""

    def __init__(self, max_message_bytes: int) -> None:
        self._limits = WireLimits(payload_bytes=max_message_bytes)
        self._lock = threading.Lock()
        self._offered: tuple[Version, Arrays] | None = None
        self._newest, self._blob = ClientPart(version=(0, 0), offset=0), b""
        """The header of the first piece of the newest weights that were asked for, and all their bytes."""
        self._digest = ""
        self._deliveries: deque[Delivery] = deque()
        self._readers: dict[str, tuple[BatchReader, PolicyColumns]] = {}
        """Reader and columns by module; empty while no chunks are taken."""
        self._episodes: ShippedEpisodes | None = None

    # -- the worker's side --------------------------------------------------------------------------------------------

    def open(self, spaces: Mapping[str, Spaces], places: int, columns: Mapping[str, PolicyColumns]) -> None:
        """Begin to take chunks. `spaces` and `columns` say by module what they hold.

        The worker's own envs have the first `places` env indices.
        """
        with self._lock:
            self._readers = {
                module_id: (BatchReader(own.observation, own.action, self._limits), columns[module_id])
                for module_id, own in spaces.items()
            }
            self._episodes = self._episodes or ShippedEpisodes(places)

    def offer(self, version: Version, arrays: Arrays, digest: str) -> None:
        """Set the newest weights. The caller must not change `arrays` afterwards."""
        with self._lock:
            self._offered = version, arrays
            self._digest = digest

    def take(self) -> Delivery | None:
        """Return the oldest delivery that waits, or None."""
        with self._lock:
            return self._deliveries.popleft() if self._deliveries else None

    @property
    def has_waiting(self) -> bool:
        """Return whether a delivery waits."""
        return bool(self._deliveries)

    def end(self, reason: Discard) -> list[Delivery]:
        """Stop taking chunks. Return what still waits, and end markers for all episodes shipped in part."""
        with self._lock:
            self._readers = {}
            markers = self._episodes.lost_all(reason) if self._episodes is not None else []
            left = [*self._deliveries, *map(_markers, markers)]
            self._deliveries.clear()
        return left

    # -- the clients' side --------------------------------------------------------------------------------------------

    def part(self, pull: ClientPull) -> Reply:
        """Return the next bytes of the newest weights; none if the client has all, or no weights exist yet.

        Only the dispatcher's loop calls it. Weights are encoded at the first request.
        """
        with self._lock:
            offered = self._offered
        if offered is not None and offered[0] != self._newest.version:
            frames = encode_weights("", *offered)
            self._newest = ClientPart(version=offered[0], offset=0, frame_sizes=[len(frame) for frame in frames])
            self._blob = b"".join(frames)
        offset = pull.offset if pull.version == self._newest.version else 0
        piece = np.frombuffer(self._blob[offset : offset + PIECE_BYTES], np.uint8)
        return Reply.of(self._newest.model_copy(update={"offset": offset}), arrays={"part": piece})

    def accept(self, owner: object, shipment: ChunkShipment, array: Any, done: Callable[[], None]) -> None:
        """Take a shipment of `owner` as a whole, or refuse it as a whole.

        Raises `ServingError` and `DecodeError` for chunks that do not fit this policy. The code is "not_yet" while no
        chunks are taken, and for weights newer than those offered.
        """
        discarded = _reasons(shipment.discarded)
        with self._lock:
            if not self._readers or self._episodes is None:
                raise ServingError("the server takes no chunks now; send the same again", "not_yet")
            batch = None
            if shipment.frame_sizes:
                batch = self._read(_frames(array, shipment.frame_sizes))
                self._check_label(batch)
                batch = self._episodes.take(owner, batch)
            s = shipment
            chunks = ClientChunks(batch, discarded, s.untrained, s.episodes, s.env_steps, s.outside)
            self._deliveries.append(Delivery(chunks, done))

    def lost(self, owner: object) -> None:
        """End the unfinished episodes of `owner`, a client that is gone, by end markers."""
        with self._lock:
            markers = self._episodes.lost(owner, Discard.CLIENT_LOST) if self._episodes is not None else []
            if self._readers:
                self._deliveries.extend(map(_markers, markers))

    def _read(self, frames: list[Buffer]) -> ChunkBatch:
        kind, raw = decode_header(frames, self._limits)
        if kind is not MessageKind.BATCH:
            raise ServingError(f"a {kind.name} message was shipped; chunks are in a BATCH", "bad_request")
        header = read_batch_header(raw)
        if len(header.modules) != 1 or header.modules[0] not in self._readers:
            raise ServingError(
                f"chunks of the modules {header.modules!r:.80}; each batch is of one of {sorted(self._readers)!r:.200}",
                "bad_request",
            )
        reader, columns = self._readers[header.modules[0]]
        batch = reader.read(header, raw, frames)
        columns.check(batch)
        return batch

    def _check_label(self, batch: ChunkBatch) -> None:
        """Raise unless the weights of the chunks were given out here, or before this worker restarted."""
        if self._offered is None:
            raise ServingError(
                "the server has no weights yet to check the chunks against; send the same again", "not_yet"
            )
        newest, digest = self._offered[0], self._digest
        seqs = batch.arrays["weights_seq"]
        version = batch.learner_epoch, int(seqs.max(initial=0))
        if version > newest:
            raise ServingError(
                f"chunks by the weights {version}, and the server has {newest}; send the same again", "not_yet"
            )
        if len(seqs) and (int(seqs.min()) < 1 or (version == newest and batch.weights_digest != digest)):
            raise ServingError(f"chunks by the weights {version}, which this server did not give out", "bad_request")


def _reasons(discarded: Mapping[str, int]) -> dict[Discard, int]:
    try:
        return {Discard(reason): steps for reason, steps in discarded.items()}
    except ValueError as error:
        raise ServingError(f"steps were discarded for an unknown reason: {error}", "bad_request") from error


def _frames(array: Any, sizes: list[int]) -> list[Buffer]:
    if array is None or array.dtype != np.uint8 or array.ndim != 1 or array.nbytes != sum(sizes):
        raise ServingError(
            f'the array "batch" should be uint8 of length {sum(sizes)}, the sum of frame_sizes', "bad_request"
        )
    return frames_of(memoryview(array), sizes)


def _markers(batch: ChunkBatch) -> Delivery:
    return Delivery(ClientChunks(batch), lambda: None)  # no client waits for an answer to end markers


@dataclass(slots=True)
class _OpenPart:
    """The newest chunk of an open episode, and a batch without chunks that has its columns."""

    row: np.void
    """Its `t_start` is the env step after its last one."""
    template: ChunkBatch


class ShippedEpisodes:
    """The open episodes of all clients that ship chunks. One thread at a time may call.

    `first_place` is the first env index that the worker's own envs do not use. An owner is any key for one client.
    """

    def __init__(self, first_place: int) -> None:
        self._next_place = first_place
        self._free: list[int] = []
        self._owned: dict[object, dict[_PartId, _OpenPart]] = {}

    def take(self, owner: object, batch: ChunkBatch) -> ChunkBatch:
        """Return the batch, of one module, with env indices, as it goes into the stream."""
        owned, template, table = self._owned.setdefault(owner, {}), batch.emptied(), batch.table.copy()
        for at, stop in enumerate(stops(table, batch.arrays.get("env_t")).tolist()):
            row = table[at]
            id = int(row["id_high"]), int(row["id_low"]), batch.agents[row["agent"]], batch.modules[0]
            known = owned.pop(id, None)
            place = self._new_place() if known is None else int(known.row["env_index"])
            table["env_index"][at] = place
            if row["end"] == ChunkEnd.ONGOING:
                owned[id] = _OpenPart(table[at].copy(), template)
                owned[id].row["t_start"] = stop
            else:
                heapq.heappush(self._free, place)
        return replace(batch, table=table)

    def lost(self, owner: object, reason: Discard) -> list[ChunkBatch]:
        """Forget `owner`. Return end markers for its open episodes, one batch per module."""
        by_module: dict[str, list[tuple[str, _OpenPart]]] = {}
        for (_, _, agent, module), part in self._owned.pop(owner, {}).items():
            by_module.setdefault(module, []).append((agent, part))
        return [self._markers(parts, reason) for parts in by_module.values()]

    def lost_all(self, reason: Discard) -> list[ChunkBatch]:
        """Forget all owners. Return end markers for all open episodes."""
        return [batch for owner in list(self._owned) for batch in self.lost(owner, reason)]

    def _markers(self, parts: list[tuple[str, _OpenPart]], reason: Discard) -> ChunkBatch:
        table = np.array([part.row for _, part in parts], CHUNK_TABLE)
        agents = list(dict.fromkeys(agent for agent, _ in parts))
        table["agent"] = [agents.index(agent) for agent, _ in parts]
        table["chunk_index"] += 1
        table["length"] = table["lookback"] = 0
        table["end"], table["reason"] = ChunkEnd.ABORTED, 1
        for place in table["env_index"].tolist():
            heapq.heappush(self._free, place)
        return replace(parts[-1][1].template, table=table, agents=agents, reasons=("", reason.value))

    def _new_place(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next_place += 1
        return self._next_place - 1
