"""The broker's log and its core together: what the core accepts is logged, and what is logged is acknowledged."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from headrace.broker.files.batch_log import BatchLog, LogNote, SourceId, log_folder, segment_paths
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.chunks.batch import BatchHeader, read_batch_header
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import Buffer, MessageKind, WireLimits, decode_header
from headrace.schemas.settings.config import BrokerSection

log = logging.getLogger(__name__)

_RETIRE_S = 1.0


class LoggedBatches:
    """Gives the core the batches that earlier brokers logged, when it is created; then logs what the core accepts."""

    def __init__(self, config: BrokerSection, run_dir: Path, core: BrokerCore, limits: WireLimits) -> None:
        self._core = core
        self.wakes, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """A descriptor that can be read when `follow` has something to do."""
        self._log = BatchLog(run_dir, config.log_max_bytes, config.log_when_full, self._wake)
        self._retire_at = 0.0
        self._noted_spaces = False
        self._recover(limits)
        self._log.start()

    def _recover(self, limits: WireLimits) -> None:
        batches, now = 0, time.monotonic()
        for found in self._log.recover():
            if isinstance(found, LogNote):
                self._core.recover_note(found.sources(), found.spaces)
                continue
            try:
                kind, raw = decode_header(found, limits)
                if kind is not MessageKind.BATCH:
                    raise DecodeError("unexpected_kind", f"{kind.name} in the broker's log")
                header = read_batch_header(raw)
            except DecodeError as error:
                log.error("broker log: a batch cannot be read and is left out: %s", error)
                continue
            self._core.recover(header, found, sum(memoryview(frame).nbytes for frame in found), now)
            self._log.know((header.slot, header.incarnation), header.seq)
            batches += 1
        held = self._core.store.held_batches()
        if batches:
            log.info(
                "broker log: read %d batches of earlier brokers; %d of them are not known to be settled", batches, held
            )

    def append(self, header: BatchHeader, frames: list[Buffer], nbytes: int) -> None:
        """Log a batch that the core has just accepted."""
        if self._core.spaces and not self._noted_spaces:
            self._noted_spaces = True
            self._log.note(LogNote(spaces=self._core.spaces))
        self._log.append((header.slot, header.incarnation), header.seq, frames, nbytes)
        self._core.store.log_backlog = self._log.backlog_bytes

    def follow(self, now: float) -> None:
        """Tell the core what is on disk and, at intervals, the log what is settled.

        Raises `RunDirError` if the log stops.
        """
        try:
            os.read(self.wakes, 4096)
        except BlockingIOError:
            pass
        else:
            for source, seq in self._log.take_synced():
                self._core.logged(source, seq)
            self._core.store.log_backlog = self._log.backlog_bytes
        if now >= self._retire_at:
            self._retire_at = now + _RETIRE_S
            sources = self._core.sources.items()
            settled = {key: s.settled for key, s in sources if s.accepted and (not s.closed or self._log.has(key))}
            self._log.retire(settled, self._core.spaces, self._is_over)

    def close(self) -> None:
        """Write all waiting records, and close the log."""
        self._log.close(self._is_over)
        os.close(self._waker)
        os.close(self.wakes)

    def _is_over(self, key: SourceId, seq: int) -> bool:
        source = self._core.sources.get(key)
        return self._core.store.is_folded(*key) or (source is not None and source.is_over(seq))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the broker has not read earlier ones, so it wakes anyway
            os.write(self._waker, b"\0")


def warn_of_log(run_dir: Path) -> None:
    """Warn of batches that an earlier broker logged, if this broker has no log."""
    nbytes = sum(path.stat().st_size for path in segment_paths(log_folder(run_dir)))
    if nbytes:
        folder = log_folder(run_dir)
        log.warning(
            "%s has %d bytes of an earlier broker's log, and broker.log = false: its batches are not recovered; set "
            "broker.log = true, or remove the folder",
            folder,
            nbytes,
        )
