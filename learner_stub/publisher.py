"""The publisher of weights to the fleet.

with WeightPublisher(endpoint) as weights:
    weights.publish(module.state_dict())
    weights.publish({"one": one.state_dict(), "two": two.state_dict()})  # several modules
    weights.log({"loss": loss})  # for metrics.csv, TensorBoard and others
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
from numpy.typing import NDArray

from headrace.learner_stub import connection
from headrace.learner_stub.fleet_place import FleetPlace, await_endpoint, keys_folder
from headrace.learner_stub.row_queue import RowQueue
from headrace.schemas.errors import DecodeError, EncodeError, RefusedWeightsError, refusal
from headrace.schemas.keys import ClientKeys, client_keys
from headrace.schemas.messages import (
    Fenced,
    LearnerHello,
    LearnerRows,
    LearnerWelcome,
    Message,
    ModuleShapes,
    Reject,
    Status,
    Version,
    WeightsAck,
    WeightsRefusal,
    read,
)
from headrace.schemas.module_spaces import check_module_ids
from headrace.schemas.weights import check_published, encode_weights, join_modules
from headrace.schemas.wire import MessageKind, decode_header

_CONTROL: dict[MessageKind, type[Message]] = {m.KIND: m for m in (LearnerWelcome, WeightsAck, Fenced, Reject, Status)}
_RETRY_S = 1.0
_SILENCE_S = 3.0
"""Seconds of silence after which the broker may be a new one that knows neither this publisher nor its weights."""
_SLOWEST_BYTES_PER_S = 10e6
"""The slowest speed at which a broker may take a version before it is sent again. Sending too early only slows it."""


StateDict = Mapping[str, torch.Tensor | NDArray[Any]]


class WeightPublisher:
    """Sends versions (learner_epoch, seq) to the broker's relay.

    It keeps the newest version and sends it again to a broker that has lost it. It shares the lease of this process's
    `EpisodeStream` on the same endpoint, which pumps it while it waits.

    keys, run_dir: as of the stream.

    Raises:
        FencedError: a newer learner has taken over; later calls raise it too.
        UnreachableError: no broker answers in time.
        KeysError: the keys cannot be used.
        KeysRefusedError: the broker does not let them in.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        fleet_id: str = "",
        connect_timeout_s: float = 60.0,
        keys: str | Path | ClientKeys | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        self._keys = client_keys(keys, "learner")
        self._place = FleetPlace(endpoint, Path(run_dir) if run_dir is not None else None, None)
        self.epoch = 0
        self.seq = 0
        self.acknowledged: Version = (0, 0)
        self._fleet_id = fleet_id
        self.token = connection.process_token(endpoint)
        self._arrays: dict[str, NDArray[Any]] | None = None
        self._rows = RowQueue()
        self._joined = False
        self._heard = 0.0
        self._next_send = 0.0
        self._refusal: tuple[str, str] | None = None
        self._weight_shapes: ModuleShapes = {}
        """Shapes of the weights that workers load; empty while none is known."""
        self._refused: WeightsRefusal | None = None
        """A version that a worker could not load, until the error for it was raised."""
        self._raised: Version = (0, 0)
        self._publishing = False
        self._socket = connection.LearnerSocket(endpoint, self._keys)
        connection.enroll(self)
        self._join(connect_timeout_s)

    @classmethod
    def of(cls, run_dir: str | Path, *, connect_timeout_s: float = 60.0, **options: Any) -> Self:
        """Return a publisher to the fleet in `run_dir`, as `EpisodeStream.of` returns a stream."""
        options = {"keys": keys_folder(run_dir), **options}
        endpoint = await_endpoint(run_dir, connect_timeout_s)
        return cls(endpoint, run_dir=run_dir, connect_timeout_s=connect_timeout_s, **options)

    @property
    def endpoint(self) -> str:
        """Return the broker's address."""
        return self._place.endpoint

    def publish(self, state_dict: StateDict | Mapping[str, StateDict]) -> int:
        """Make these the fleet's newest weights. Return their seq. Copies them, and does not wait for their arrival.

        With several modules: module id -> state dict. A module that is left out is frozen: workers go on with the
        weights that they have for it, and those that start later use the ones it was built with. Arrays named
        "connectors/..." beside a module's tensors are state of its connectors.

        Raises `EncodeError` for a tensor whose dtype has no place on the wire, and for an invalid module id;
        `WeightsMismatchError` and `WhichModuleError` for weights that do not fit the workers' modules, as soon as a
        worker has told their shapes. `RefusedWeightsError` says that a worker could not load an earlier version. This
        method raises it once the new one is sent; a waiting stream raises it too. Workers go on with the weights that
        they have.
        """
        arrays = {name: _to_array(name, value) for name, value in _flat(state_dict).items()}
        if not arrays:
            raise EncodeError("a state dict without tensors cannot be published; publish at least one")
        if self._weight_shapes:
            check_published(arrays, self._weight_shapes)
        connection.note_published(self.token, (self.epoch, self.seq + 1))
        self._publishing = True
        try:
            # The broker hears from the stream how much to sample before it gets the weights.
            connection.pump_together(self)
        finally:
            self._publishing = False
        self.seq += 1
        self._arrays = arrays
        self._send_weights()
        self.pump()
        return self.seq

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log figures of the learner at this moment, such as the losses of one update, as one row. Never waits.

        The row gets into `metrics.jsonl` and `metrics.csv` of the run, each name after "learner/", and to all other
        loggers of the fleet. It has the fleet's env steps and the newest published weights beside them. Rows wait for a
        broker or a Redis that is away, the newest 1,000 of them. Numbers that are not finite are left out.

        Raises `ValueError` for a name that is not 1 to 100 printable ASCII characters, for a value that is no number,
        and for more than 128 values.
        """
        self._rows.add(metrics, self.epoch, self.seq, time.time())
        self.pump()

    def pump(self, wait_s: float = 0.0) -> None:
        """Take answers; say HELLO again or send the newest version again when the broker lacks it."""
        while (frames := self._socket.receive(wait_s)) is not None:
            wait_s = 0.0
            try:
                kind, header = decode_header(frames)
                if kind in _CONTROL:
                    self._receive(read(_CONTROL[kind], header))
            except DecodeError as error:
                if error.reason == "version_mismatch":
                    raise refusal(error.reason, f"broker at {self.endpoint}: {error.detail}") from error
        if self._refusal is not None:
            raise refusal(*self._refusal)
        self._raise_refused()
        now = connection.now()
        if self._joined and now - self._heard > _SILENCE_S:
            self._joined, self._next_send = False, now
        self._follow_broker(now)
        if now >= self._next_send:
            if not self._joined:
                self._say_hello()
            elif self._arrays is not None and self.acknowledged < (self.epoch, self.seq):
                self._send_weights()
        if self._joined:
            self._send_rows(now)

    def close(self) -> None:
        """Close the connection; the relay keeps the last version. Rows not sent so far are sent once."""
        if self._joined:
            while self._send_rows(connection.now(), at_once=True):
                pass
        connection.leave(self)
        connection.forget_published(self.token)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow_broker(self, now: float) -> None:
        """Connect to the broker's new address if it has one."""
        before = self.endpoint
        moved = self._place.observe(self._joined, now)
        if moved is not None:
            connection.move_token(self.token, before, moved)
            self._socket.close(0.0)
            self._socket = connection.LearnerSocket(moved, self._keys)
            self._next_send = 0.0

    def _raise_refused(self) -> None:
        """Raise once the error for a version that a worker refused, but not while another is being published."""
        refused = self._refused
        if refused is not None and not self._publishing:
            self._refused, self._raised = None, refused.version
            raise RefusedWeightsError(refused.version, refused.slot, refused.detail)

    def _join(self, timeout_s: float) -> None:
        deadline = connection.now() + timeout_s
        try:
            while not self._joined:
                if connection.now() > deadline:
                    raise self._socket.why_silent(timeout_s)
                self.pump(0.05)
        except BaseException:
            self.close()
            raise

    def _say_hello(self) -> None:
        self._next_send = connection.now() + _RETRY_S
        hello = LearnerHello(fleet_id=self._fleet_id, token=self.token, channel="publisher", epoch=self.epoch)
        if not self._socket.send(hello.frames()):
            self._next_send = 0.0  # there is no connection yet: send again as soon as there is one

    def _send_weights(self) -> None:
        assert self._arrays is not None
        nbytes = sum(array.nbytes for array in self._arrays.values())
        self._next_send = connection.now() + _RETRY_S
        if self._socket.send(encode_weights(self._fleet_id, (self.epoch, self.seq), self._arrays)):
            self._next_send += nbytes / _SLOWEST_BYTES_PER_S

    def _send_rows(self, now: float, *, at_once: bool = False) -> bool:
        rows = self._rows.due(now, at_once=at_once)
        if not rows:
            return False
        sent = self._socket.send(LearnerRows(epoch=self.epoch, rows=rows).frames())
        if not sent:
            self._rows.send_again()
        return sent

    def _receive(self, message: Message) -> None:
        self._heard = connection.now()
        if isinstance(message, LearnerWelcome):
            self._joined = True
            self._rows.send_again()
            self._fleet_id = message.fleet_id
            self.epoch = message.epoch
            self._weight_shapes = message.weight_shapes or self._weight_shapes
            if self._arrays is None and message.published[0] == self.epoch:
                # of an earlier publisher of this process; workers ignore a version that is not newer
                self.seq = message.published[1]
            self._lacks(message.published)
        elif isinstance(message, Status):
            self._rows.stored(message.rows_stored)
            if message.epoch != self.epoch:
                self.epoch = message.epoch
            if self.acknowledged == (self.epoch, self.seq):
                self._lacks(message.published)
            self._weight_shapes = message.weight_shapes or self._weight_shapes
            if message.refused is not None and message.refused.version > max(self._raised, (self.epoch, 0)):
                self._refused = message.refused
        elif isinstance(message, WeightsAck):
            self.acknowledged = max(self.acknowledged, message.version)
        elif isinstance(message, Fenced):
            self._refusal = ("fenced", message.detail)
        elif isinstance(message, Reject):
            self._on_reject(message)

    def _lacks(self, published: Version) -> None:
        """Send the newest version again if `published`, which the broker has, is older."""
        if self._arrays is not None and published < (self.epoch, self.seq):
            self.acknowledged = published
            self._next_send = min(self._next_send, connection.now() + 0.1)

    def _on_reject(self, reject: Reject) -> None:
        if reject.fatal:
            self._refusal = (reject.code, reject.detail)
        else:
            self._joined = False
            self._next_send = 0.0


def _flat(state_dict: StateDict | Mapping[str, StateDict]) -> StateDict:
    """Return one state dict as it is, those of several modules under joined names."""
    by_module: dict[str, StateDict] = {k: value for k, value in state_dict.items() if isinstance(value, Mapping)}
    if not by_module:
        return cast(StateDict, state_dict)
    strays = sorted(state_dict.keys() - by_module.keys())
    if strays:
        raise EncodeError(f"{strays[:5]} stand beside state dicts of modules; put each tensor into its module's")
    try:
        check_module_ids(by_module)
    except ValueError as error:
        raise EncodeError(f"these weights cannot be published: {error}") from error
    return join_modules(by_module)


def _to_array(name: str, value: torch.Tensor | NDArray[Any]) -> NDArray[Any]:
    """Copy a tensor to a numpy array; bfloat16, which numpy lacks, becomes float32."""
    if not isinstance(value, torch.Tensor):
        return value.copy()
    tensor = value.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    try:
        return tensor.numpy(force=True).copy()
    except TypeError as error:
        raise EncodeError(f"tensor {name!r} of dtype {value.dtype} cannot be published: {error}") from error
