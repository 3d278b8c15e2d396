"""The publisher of weights to the fleet.

with WeightPublisher(endpoint) as weights:
    weights.publish(module.state_dict())
    weights.publish({"one": one.state_dict(), "two": two.state_dict()})  # several modules
    weights.log({"loss": loss})  # for metrics.jsonl, TensorBoard and others
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.learner_stub.link import connection
from headrace.learner_stub.link.broker_link import BrokerLink, await_message
from headrace.learner_stub.link.fleet_place import Where, address_sources, as_list, find_fleet
from headrace.learner_stub.publishing.broker_weights import BrokerWeights
from headrace.learner_stub.publishing.task_publisher import TaskPublisher
from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.closable import Closable
from headrace.schemas.basics.process_usage import free_memory
from headrace.schemas.basics.stop_event import check_stop, interrupt_held
from headrace.schemas.basics.tensor_array import bits_of, widened
from headrace.schemas.chunks.module_spaces import check_module_ids
from headrace.schemas.credentials.keys import ClientKeys, client_keys
from headrace.schemas.errors import EncodeError, NotFiniteError, refusal
from headrace.schemas.frames.manifest import WEIGHTS_LIMITS, as_sent
from headrace.schemas.messages.weights import (
    Arrays,
    fit_published,
    join_modules,
    merge_published,
    nbytes_of,
    split_modules,
    unwrapped,
    weights_digest,
)
from headrace.schemas.peers.fleet_address import AddressSource
from headrace.schemas.peers.fleet_place import FleetPlace, broker_fleet_id

log = logging.getLogger("headrace.learner")

StateDict = Mapping[str, torch.Tensor | NDArray[Any]]


class WeightPublisher(Closable):
    """Sends versions (learner_epoch, seq) to the broker's relay.

    It keeps the newest version and sends it again to a broker that has lost it. It shares the lease of this process's
    `EpisodeStream` on the same endpoint, which pumps it while it waits. With several brokers, each gets all versions
    under the same seq and its own epoch.

    endpoint, keys, run_dir, rendezvous: as for `EpisodeStream`.

    Raises:
        ConfigError: this process reads as another rank than 0.
        FencedError: a newer learner has taken over; later calls raise it too.
        UnreachableError: no broker answers in time.
        KeysError: the keys cannot be used.
        KeysRefusedError: the broker does not let them in.
        RunDirError: `endpoint` is a Unix socket in a folder that is not this user's alone.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        fleet_id: str = "",
        connect_timeout_s: float = 60.0,
        keys: str | Path | ClientKeys | None = None,
        run_dir: str | Path | None = None,
        rendezvous: Where | AddressSource | Sequence[AddressSource] = None,
    ) -> None:
        endpoints = as_list(endpoint)
        connection.check_publishes(endpoints)
        peer_keys = client_keys(keys, "learner")
        sources = address_sources(run_dir, rendezvous, len(endpoints))
        self.token = connection.process_token(endpoints)
        self._lock = connection.shared(self.token).lock
        self._forget_published = weakref.finalize(self, connection.forget_shared, self.token)
        self._brokers: list[BrokerWeights] = []
        for number, (address, source) in enumerate(zip(endpoints, sources, strict=True)):
            place = FleetPlace(address, "learner", source, says_waiting=False)  # the stream says it
            link = BrokerLink(place, peer_keys, self.token, number)
            self._brokers.append(BrokerWeights(link, broker_fleet_id(fleet_id, number, len(endpoints))))
        self._options: dict[str, Any] = {"fleet_id": fleet_id, "keys": peer_keys or "", "rendezvous": sources}
        self._options["connect_timeout_s"] = connect_timeout_s
        self._tasks: TaskPublisher | None = None
        self._publishing = False
        self._newest: Arrays = {}
        self._has_warned = False
        connection.enroll(self)
        self._join(connect_timeout_s)

    @classmethod
    def of(cls, where: Where | Sequence[Where] = None, *, connect_timeout_s: float = 60.0, **options: Any) -> Self:
        """Return a publisher to the fleet whose run directory or rendezvous is `where`, as `EpisodeStream.of` does."""
        endpoint, found = find_fleet(where, connect_timeout_s, options)
        return cls(endpoint, **found)

    def __repr__(self) -> str:
        known = f"version {(self.epoch, self.seq)}, the broker has {tuple(self.acknowledged)}"
        return f"<WeightPublisher to {self.endpoint}: {known}>"

    @property
    def endpoint(self) -> str:
        """Return the broker's address; those of several brokers with commas between them."""
        return ", ".join(broker.link.name for broker in self._brokers)

    @property
    def tasks(self) -> TaskPublisher:
        """Return a publisher of tasks to the same brokers: opened when first used, and closed with this one."""
        if self._tasks is None:
            self._tasks = TaskPublisher([broker.link.endpoint for broker in self._brokers], **self._options)
        return self._tasks

    @property
    def epoch(self) -> int:
        """Return the learner epoch of this process's lease, the largest of several brokers."""
        return max(broker.epoch for broker in self._brokers)

    @property
    def seq(self) -> int:
        """Return the number of the newest version; 0 before the first."""
        return max(broker.seq for broker in self._brokers)

    @property
    def acknowledged(self) -> Version:
        """Return the newest version that the broker has; of several, the newest that all answering brokers have."""
        answering = [broker for broker in self._brokers if broker.joined] or self._brokers
        return min((broker.acknowledged for broker in answering), key=lambda version: version[1])

    def publish(
        self, state_dict: StateDict | Mapping[str, StateDict], *, partial: bool = False, allow_non_finite: bool = False
    ) -> int:
        """Make these the fleet's newest weights. Return their seq. Copies them, and does not wait for their arrival.

        With several modules: module id -> state dict. A module that is left out is frozen: it keeps what this publisher
        sent for it last, or else the weights that it was built with. Arrays named "connectors/..." beside a module's
        tensors are state of its connectors. `_orig_mod.` of `torch.compile` is taken out of names, and a `module.` of
        DDP where it is in front of all of them.

        Tensors may be on any device, and keep their dtype on the wire, bfloat16 and float8 too. What stands under two
        names, as tied parameters, is sent once. Workers cast floats of any width to those of their module. Integers or
        bools in the place of floats are refused.

        With `partial`, only these tensors change, as a LoRA's, and those tied to them. The others stay as last sent,
        and are not sent again to a broker on another machine. Workers get the whole, or the part if they have the rest.

        Raises `NotFiniteError` for NaN and infinities. A module may hold them on purpose, as in a buffer with a mask:
        with `allow_non_finite` they are published, with one warning. A state dict does not tell buffers from
        parameters, so the check is then off for both.

        Raises `EncodeError` for weights that may not go on the wire: more than 4 GiB or 65,536 arrays, a value that is
        no tensor or array, a dtype without a place there, a name that is no text, an invalid module id, a part of no
        version before. Raises `WeightsMismatchError` and `ModuleError` for weights that do not fit the workers'
        modules, as soon as a worker has told of them. `RefusedWeightsError` says that a worker could not load an
        earlier version. This method raises it once the new one is sent; a waiting stream raises it too. Workers go on
        with the weights that they have.
        """
        self._check_usable()
        with connection.shared(self.token).time_spent.part("publish"), interrupt_held(), self._lock:
            arrays, seq, before = _as_sent(unwrapped(array_views(state_dict))), self.seq + 1, self._newest
            if partial and before:
                arrays = merge_published(before, arrays)
            elif partial:
                raise EncodeError("this publisher has sent no version of which this can be a part; publish all weights")
            elif (given := split_modules(arrays)) is not None:  # workers that start later get this version alone
                arrays = _as_sent(join_modules({**(split_modules(before) or {}), **given}))
            if told := connection.shared(self.token).weights:
                arrays = fit_published(arrays, *told)
            changed = {n: a for n, a in arrays.items() if before.get(n) is not a}
            self._check_finite(changed, allow_non_finite)
            connection.shared(self.token).published = [(broker.epoch, seq) for broker in self._brokers]
            self._publishing = True
            try:
                # The broker hears from the stream how much to sample before it gets the weights.
                connection.pump_together(self)
            finally:
                self._publishing = False
            copies, digest = self._copy(seq, arrays, changed)
            for broker in self._brokers:
                broker.publish(seq, copies, digest, changed)
            self._newest = copies
            self.pump()
        return seq

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log figures of the learner at this moment, such as the losses of one update, as one row. Never waits.

        The row gets into `metrics.jsonl` of the run, each name after "learner/", and to all other
        loggers of the fleet. It has the fleet's env steps and the newest published weights beside them. Rows wait for a
        broker or a Redis that is away, the newest 1,000 of them. Numbers that are not finite are left out.

        Raises `ValueError` for a name that is not 1 to 100 printable ASCII characters, for a value that is no number,
        and for more than 128 values.
        """
        self._check_usable()
        with connection.shared(self.token).time_spent.part("publish"), interrupt_held(), self._lock:
            for broker in self._brokers:
                if broker.epoch:
                    broker.rows.add(metrics, broker.epoch, self.seq, time.time())
            self.pump()

    def pump(self, wait_s: float = 0.0) -> None:
        """Take answers; say HELLO again or send the newest version again when a broker lacks it."""
        self._check_usable()
        connection.check_newest(self.token)
        if wait_s > 0:
            await_message([broker.link for broker in self._brokers], wait_s, self._lock)
        now = connection.now()
        with self._lock:
            for broker in self._brokers:
                broker.pump()
                if broker.refusal is not None:
                    raise refusal(*broker.refusal)
            for broker in self._brokers:
                if not self._publishing and (error := broker.take_refused()) is not None:
                    raise error  # once, and not while another version is being published
            for broker in self._brokers:
                broker.tick(now)

    def _check_usable(self) -> None:
        """Raise `HeadraceError` if it is closed, or a copy by `fork`, which would write to memory of the broker."""
        for broker in self._brokers:
            broker.link.check()

    __reduce__ = connection.refuse_copy

    def close(self) -> None:
        """Close the connection; the relay keeps the last version. Rows not sent so far are sent once."""
        connection.leave(self)
        self._forget_published()
        if not all(broker.link.usable for broker in self._brokers):
            return
        with self._lock:
            for broker in self._brokers:
                broker.close()
        if self._tasks is not None:
            self._tasks.close()

    def _check_finite(self, arrays: Arrays, allow_non_finite: bool) -> None:
        try:
            check_finite(arrays, 0 if self._has_warned else self.seq)
        except NotFiniteError as error:
            if not allow_non_finite:
                raise
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "published although %s of %s values of %r are not finite", error.bad, error.size, error.name
                )

    def _copy(self, seq: int, arrays: Arrays, changed: Arrays) -> tuple[Arrays, str]:
        """Copy a version once: to memory that a broker on this machine maps, or else to memory of this process."""
        for broker in self._brokers:
            if (shared := broker.share(seq, arrays)) is not None:
                return shared
        if (nbytes := nbytes_of(changed)) > (free := free_memory()):
            raise EncodeError(
                f"weights of {nbytes >> 20:,} MiB cannot be copied; {free / 2**20:,.0f} MiB of memory are left"
            )
        copies = {**arrays, **each_once(np.ndarray.copy, changed)}
        return copies, weights_digest(copies)

    def _join(self, timeout_s: float) -> None:
        deadline = connection.now() + timeout_s
        try:
            while not any(broker.joined for broker in self._brokers):
                if connection.now() > deadline:
                    raise self._brokers[0].link.why_silent(timeout_s)
                check_stop()
                self.pump(0.05)
        except BaseException:
            self.close()
            raise


def as_arrays(
    state_dict: StateDict | Mapping[str, StateDict], *, allow_non_finite: bool = False
) -> dict[str, NDArray[Any]]:
    """Return copies of all tensors as arrays, those of several modules under joined names, bfloat16 as float32.

    Raises `EncodeError`, and `NotFiniteError` unless `allow_non_finite`.
    """
    arrays = array_views(state_dict)
    if not allow_non_finite:
        check_finite(arrays)
    return {name: widened(array) if array.dtype.names else array.copy() for name, array in arrays.items()}


def each_once(change: Callable[[NDArray[Any]], NDArray[Any]], arrays: Arrays) -> Arrays:
    """Return changed arrays. One that stands under two names stands under both again."""
    changed = {id(array): change(array) for array in arrays.values()}
    return {name: changed[id(array)] for name, array in arrays.items()}


def check_finite(arrays: Arrays, published: int = 0) -> None:
    """Raise `NotFiniteError` for the first array that has a NaN or an infinity. `published`: the newest finite seq."""
    for name, array in arrays.items():
        if array.dtype.kind not in "fV":
            continue
        wide = widened(array)
        # One pass, and the usual case. The sum is not finite if one of the numbers is not, or if it overflows.
        if not math.isfinite(np.vdot(wide, wide)) and not (finite := np.isfinite(wide)).all():
            bad = array.size - int(finite.sum())
            since = f" since version {published:,} was published" if published else ""
            cause = "a loss of NaN, as by the std() of a minibatch of one step (headrace.minibatches makes none), or "
            raise NotFiniteError(
                name,
                bad,
                array.size,
                f"the weights are not finite: {bad:,} of {array.size:,} values of {name!r:.200} are NaN or "
                f"infinite{since}; the cause may be {cause if np.isnan(wide).all() else ''}too large a step: go on "
                "from the last checkpoint with a lower learning rate or clipped gradients; if they are meant, as in a "
                "buffer with a mask, pass allow_non_finite=True",
            )


_REMEDY = "module.state_dict(), or {module id: state dict} for several modules"


def array_views(state_dict: StateDict | Mapping[str, StateDict]) -> dict[str, NDArray[Any]]:
    """Return all tensors as arrays, without a copy where they are in the processor's memory.

    Tensors that are the same part of one memory are one array. Raises `EncodeError`.
    """
    if not isinstance(state_dict, Mapping):
        raise EncodeError(f"{type(state_dict).__name__} is no state dict; give {_REMEDY}")
    if "param_groups" in state_dict:
        raise EncodeError(f"this is the state dict of an optimizer, which workers do not need; give {_REMEDY}")
    known: _Known = {}
    arrays = {name: _to_array(name, value, known) for name, value in _flat(state_dict).items()}
    if not arrays:
        raise EncodeError("a state dict without tensors cannot be published or saved; give at least one")
    return arrays


def _as_sent(arrays: Arrays) -> Arrays:
    """Return arrays with the bytes that go on the wire. Raises `EncodeError` for those that may not."""
    nbytes, most = nbytes_of(arrays), WEIGHTS_LIMITS
    if nbytes > most.payload_bytes or len(arrays) > most.arrays:
        allowed = f"{most.payload_bytes >> 20:,} MiB in {most.arrays:,} are allowed"
        raise EncodeError(
            f"weights of {nbytes >> 20:,} MiB in {len(arrays):,} arrays cannot be published; {allowed}; "
            "publish fewer or smaller ones"
        )
    return {name: as_sent(name, array) for name, array in arrays.items()}


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


_Known = dict[Any, tuple[torch.Tensor, NDArray[Any]]]
"""Address, shape, strides and dtype of a tensor -> it, so that its address stays its own, and its array."""


def _to_array(name: str, value: torch.Tensor | NDArray[Any], known: _Known) -> NDArray[Any]:
    """Return a tensor as a numpy array. One of the same memory that is `known` comes again.

    Raises `EncodeError` for anything else than a tensor or an array, and for a name that is no text.
    """
    if not isinstance(name, str) or not name.isprintable():
        raise EncodeError(f"{name!r:.80} cannot be the name of a tensor: it is no printable text")
    if isinstance(value, np.ndarray | np.generic) and not np.ma.is_masked(value):
        return np.asarray(value)
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__
        remedy = "; give its state_dict()" if isinstance(value, torch.nn.Module) else ""
        raise EncodeError(f"{name!r} is of type {kind}; only tensors and arrays can be published or saved{remedy}")
    try:
        key = value.data_ptr(), value.shape, value.stride(), value.dtype
        if key not in known:
            known[key] = value, bits_of(value)
        return known[key][1]
    except (TypeError, RuntimeError) as error:  # a sparse tensor, or one on the device "meta"
        why: object = 'it is on the device "meta" and has no numbers' if value.is_meta else error
        if hasattr(value, "full_tensor"):
            why = "it is a shard; give get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))"
        raise EncodeError(f"tensor {name!r} of dtype {value.dtype} cannot be published: {why}") from error
