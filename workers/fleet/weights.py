"""Collects a worker's weights: from broadcasts when small; when large, mapped from this machine's shared memory.

Weights that are not in shared memory, and missed broadcasts, are pulled in pieces.

A version is collected and checked before the sampler gets it. Versions that are not newer than the newest collected one
are ignored, so the version in use never goes back.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import xxhash

from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.process_usage import free_memory
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import WEIGHTS_LIMITS, Buffer, MessageKind, WireMessage, decode, frames_of
from headrace.schemas.messages import WeightsHeader, WeightsPart, WeightsPull, read
from headrace.schemas.messages.shared_weights import SharedWeights
from headrace.schemas.messages.weights import (
    MOST_WEIGHTS_BYTES,
    Arrays,
    WeightsVersion,
    check_digest,
    merge_received,
    read_weights,
    take_digest,
)
from headrace.schemas.messages.weights_file import NewFile
from headrace.schemas.messages.weights_messages import PIECE_BYTES

log = logging.getLogger(__name__)

PIECES_IN_FLIGHT = 8
"""Most pieces requested and not received. They fill a fast link, and bound the queue at the broker."""
PULL_RETRY_S = 2.0
OTHERS_PULL_S = 10.0
"""Seconds to wait for a worker of this machine that pulls a version and writes nothing, before another pulls it."""
SEEK_S = 0.005
"""Seconds between two looks for a version that another worker of this machine pulls."""
BROADCAST_S = 0.2
"""Seconds to wait for the broadcast of a version that the broker announced, before the worker pulls it."""


class OwnMemory:
    """Memory of this process for the frames of a version. It is taken as pieces come, not at once."""

    def __init__(self, sizes: list[int]) -> None:
        self.frames = frames_of(np.empty(sum(sizes), np.uint8).data, sizes)

    def put(self, frame: int, offset: int, part: Buffer) -> None:
        """Write bytes of one frame."""
        memoryview(self.frames[frame])[offset : offset + len(part)] = part

    def close(self) -> None:
        """Do nothing."""


class ArrivingWeights:
    """The frames of one version's WEIGHTS message, of which the first `have` bytes have come.

    `room` takes the frames: a file that other processes will map, or memory of this process. They are hashed as they
    come, so that hardly anything is left to do after the last piece.
    """

    def __init__(self, version: Version, sizes: list[int], room: OwnMemory | NewFile) -> None:
        self.version, self.sizes, self.size = version, sizes, sum(sizes)
        self.have = 0
        self.room = room
        self.message: tuple[WeightsHeader, Arrays] | None = None
        """Header and arrays, once all have come."""
        self._starts = list(accumulate(sizes, initial=0))
        self._checksum = xxhash.xxh3_64()
        self._checks = self._check()
        self._check_at: float = next(self._checks)

    def add(self, piece: Buffer) -> None:
        """Take the bytes that follow. Raises `DecodeError` for wrong ones, and `OSError` without room."""
        left = memoryview(piece)
        while left:
            frame = bisect_right(self._starts, self.have) - 1
            part = left[: self._starts[frame + 1] - self.have]
            self.room.put(frame, self.have - self._starts[frame], part)
            if frame > 1:
                self._checksum.update(part)
            self.have, left = self.have + len(part), left[len(part) :]
        while self.have >= self._check_at:
            self._check_at = next(self._checks, math.inf)

    def _check(self) -> Iterator[int]:
        """Check the message as it comes. Yield how many bytes must be there for the next step."""
        yield sum(self.sizes[:2])
        message, digest = decode(self.room.frames, checks_payload=False), xxhash.xxh3_128()
        if message.kind is not MessageKind.WEIGHTS:
            raise DecodeError("unexpected_kind", f"{message.kind.name} was pulled for weights")
        header, payload = read(WeightsHeader, message.header), message.header.get("payload") or {"arrays": []}
        starts = {name: self._starts[2 + frame] + offset for name, _, _, frame, offset in payload["arrays"]}
        yield from take_digest(message.arrays, digest, starts)
        yield self.size
        if payload.get("checksum") != self._checksum.intdigest():
            raise DecodeError("payload_checksum", "payload does not match its checksum")
        if digest.hexdigest() != header.digest:
            check_digest(header, message.arrays)
        self.message = header, message.arrays


class WeightsReceiver:
    """Collects versions from messages, says which requests to send, and returns the newest version."""

    def __init__(self, fleet_id: str, shared: SharedWeights | None = None) -> None:
        self.fleet_id = fleet_id
        self._shared = shared
        self.newest: Version = (0, 0)
        self._ready: WeightsVersion | None = None
        self._whole: WeightsVersion | None = None
        """The same, for parts of later ones. This machine's memory has it anyway."""
        self._wanted: Version = (0, 0)
        self._arriving: ArrivingWeights | None = None
        """The version that is pulled, from its first piece on."""
        self._asked = 0
        """Bytes of it that are asked for."""
        self._ask_at: float | None = None
        self._sought: WeightsHeader | None = None
        """An announced version that another worker of this machine pulls."""
        self._others_until = 0.0
        """The time until which it, or a newer one, is left to that worker."""
        self._progress = 0
        """Bytes that the other worker had written when that time was set."""

    def receive(self, message: WireMessage, now: float) -> None:
        """Handle a WEIGHTS or WEIGHTS_PART message. One that fails its checksums is dropped and logged."""
        try:
            if message.kind is MessageKind.WEIGHTS_PART:
                self._take_part(message, now)
            else:
                self._take(*read_weights(message), now)
        except DecodeError as error:
            log.warning("weights refused: %s", error)

    def hear_of(self, version: Version, now: float) -> None:
        """Note that the broker has `version`. If no broadcast brings it within `BROADCAST_S`, it will be pulled."""
        self._want(version, now + BROADCAST_S)

    @property
    def maps(self) -> bool:
        """Return whether versions may come from this machine's memory."""
        return self._shared is not None

    @property
    def pulling(self) -> bool:
        """Return whether part of a version has arrived. Asking early for the next pieces completes it sooner."""
        return self._arriving is not None

    @property
    def patience_s(self) -> float:
        """Return the seconds after which `requests` is to be called again, whatever has come."""
        return math.inf if self._sought is None else SEEK_S

    def take(self) -> WeightsVersion | None:
        """Return the newest version collected since the last call, or None."""
        ready, self._ready = self._ready, None
        return ready

    def requests(self, now: float) -> list[WeightsPull]:
        """Return the requests to send to the broker now: the next pieces of a version being pulled.

        The first piece tells how many there are. Pieces that have not come in time are asked for again.
        """
        if self._sought is not None:
            self._seek(self._sought, now)
        if self._wanted <= self.newest or self._ask_at is None:
            return []
        arriving = self._arriving
        version, have, size = (arriving.version, arriving.have, arriving.size) if arriving else ((0, 0), 0, 1)
        if now >= self._ask_at:
            self._asked, self._ask_at = have, now + PULL_RETRY_S
        elif arriving is None:
            return []
        offsets = range(self._asked, min(have + PIECES_IN_FLIGHT * PIECE_BYTES, size), PIECE_BYTES)
        self._asked += len(offsets) * PIECE_BYTES
        return [WeightsPull(version=version, offset=offset, length=PIECE_BYTES) for offset in offsets]

    def _want(self, version: Version, ask_at: float) -> None:
        if version > max(self.newest, self._wanted):
            self._wanted = version
            if not self.pulling or self._ask_at is None:  # otherwise the requested pieces bring the newer version
                self._ask_at = ask_at if self._ask_at is None else min(self._ask_at, ask_at)

    def _expect(self, version: Version, ask_at: float) -> None:
        """Pull an announced version at `ask_at`, overriding a time set by an earlier heartbeat."""
        self._want(version, ask_at)
        if version == self._wanted and not self._asked:
            self._ask_at = ask_at

    def _take(self, header: WeightsHeader, arrays: Arrays, now: float) -> None:
        """Take a checked version, or look for one that is announced, or of which a part came without its base."""
        if not self._is_news(header):
            return
        if header.base:
            whole = self._whole
            arrays = merge_received(header, whole.digest, whole.arrays, arrays) if whole is not None else {}
            header = header.model_copy(update={"base": ""})
        if arrays:
            self._take_arrays(header, arrays, now)
        else:
            self._seek(header, now)

    def _is_news(self, header: WeightsHeader) -> bool:
        return header.version > self.newest and header.fleet_id == self.fleet_id

    def _take_arrays(self, header: WeightsHeader, arrays: Arrays, now: float) -> None:
        self.newest = header.version
        self._ask_at = None if self._wanted <= self.newest else now
        if self._arriving is None or self._arriving.version <= self.newest:
            self._stop()
        self._ready = WeightsVersion(header.version, header.digest, arrays)
        self._whole = self._ready if self._shared is not None else None
        self._sought = None
        if self._shared is not None:
            self._shared.release()

    def _seek(self, header: WeightsHeader, now: float) -> None:
        """Take an announced version from this machine's memory, or pull it, unless another worker pulls it for all.

        If the other worker ends without writing the version, this worker pulls it.
        """
        shared = self._shared
        found = shared.read(header.version, header.digest) if shared is not None else None
        may_pull = shared is None or (found is None and shared.claim())
        if may_pull and shared is not None:
            found = shared.read(header.version, header.digest)  # another may have written it before it ended
        if found is not None:
            self._take_arrays(header, found[1], now)
        elif may_pull:
            self._sought = None
            self._expect(header.version, now)
        elif shared is not None and (self._sought != header or now >= self._others_until):
            progress = shared.progress()
            if self._sought is None or progress != self._progress:
                self._others_until, self._progress = now + OTHERS_PULL_S, progress
            self._sought = header
            self._expect(header.version, self._others_until)

    def _take_part(self, message: WireMessage, now: float) -> None:
        part = read(WeightsPart, message.header)
        piece = message.arrays.get("part")
        if piece is None or part.version <= self.newest:
            return
        arriving = self._arriving
        if arriving is None or (part.version, part.frame_sizes) != (arriving.version, arriving.sizes):
            arriving = self._start(part.version, part.frame_sizes)
        if part.offset != arriving.have or piece.nbytes > arriving.size - arriving.have:
            return
        self._ask_at = now + PULL_RETRY_S  # a retry, also in case the collected bytes are not the published ones
        try:
            arriving.add(piece.reshape(-1).view(np.uint8).data)
            self._asked = max(self._asked, arriving.have)
            if arriving.message is not None:
                header, arrays = arriving.message
                if self._shared is not None and arrays and self._is_news(header):
                    self._shared.arrived(header)  # this machine's other workers find it
                self._stop()
                self._take(header, arrays, now)
        except OSError as error:
            self._pull_alone(error, now)
        except DecodeError:
            self._stop()
            raise

    def _start(self, version: Version, sizes: list[int]) -> ArrivingWeights:
        """Make room for a version. Memory is taken as pieces come, not at once.

        Raises `DecodeError` for sizes that no version has, or for which this machine has no memory. A version of no
        bytes would never be complete.
        """
        size = sum(sizes)
        if not 0 < size <= MOST_WEIGHTS_BYTES or len(sizes) > WEIGHTS_LIMITS.frames:
            allowed = f"1 to {MOST_WEIGHTS_BYTES} in {WEIGHTS_LIMITS.frames} are allowed"
            raise DecodeError("payload_sizes", f"weights {version} of {size} bytes in {len(sizes)} frames; {allowed}")
        self._stop()
        room = self._shared.arriving(version, sizes) if self._shared is not None else None
        if room is None and self._shared is not None:
            self._shared.release()  # nobody has to wait for what comes to memory of this process
        if room is None and size > (free := free_memory()):
            raise DecodeError("payload_sizes", f"weights {version} of {size} bytes; {free:.0f} of memory are left")
        self._arriving = ArrivingWeights(version, sizes, room or OwnMemory(sizes))
        return self._arriving

    def _stop(self) -> None:
        """Forget the version that is pulled, which other workers cannot find."""
        if self._arriving is not None:
            self._arriving.room.close()
        self._arriving, self._asked = None, 0
        if self._shared is not None:
            self._shared.give_up()

    def _pull_alone(self, error: OSError, now: float) -> None:
        """Pull again from the start, to memory of this process, where the file of all has no more room."""
        self._stop()
        if self._shared is not None:
            self._shared.give_up(error)
            self._shared.release()
        self._ask_at = now
