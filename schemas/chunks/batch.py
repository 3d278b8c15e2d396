"""A batch of chunks in columns: samplers fill it, the wire carries it, learners read it.

Each column holds the steps of all chunks, one chunk after another. `table` has one `CHUNK_TABLE` row for each chunk.

| column | rows of chunk i |
|---|---|
| step (actions, rewards, ...) | `offsets[i]:offsets[i+1]` |
| observation ("obs...") | `obs_offsets[i]:obs_offsets[i+1]`: one more than steps, since a chunk has T+1 observations |
| state ("state_in/...": a recurrent module's memory before the chunk's first step) | one, if the chunk has steps |
| lookback ("lookback/...": see `LOOKBACK`) | as many as the chunk looks back |

On the wire (`wire.py`) the columns are the message's arrays. The table is the array `_table`, `_infos` is JSON, and
`_connectors/...` holds what the connectors learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, overload

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from headrace.schemas.accounts.ledger import Discard, WorkerTotals
from headrace.schemas.basics.bounds import (
    MOST_TASKS,
    BatchCount,
    ChosenName,
    EpochOrNone,
    IncarnationOrNone,
    ListOf,
    Natural,
    Positive,
    Slot,
    TaskName,
    WeightsSeq,
)
from headrace.schemas.chunks.batch_views import TimeMajor, Transitions, time_major, transitions
from headrace.schemas.chunks.chunk import (
    CHUNK_TABLE,
    DEFAULT_AGENT,
    EXPLORE,
    LOOKBACK,
    RANDOM_ACTIONS,
    UNSEEDED,
    ChunkEnd,
    EpisodeChunk,
    Lookback,
    format_episode_id,
)
from headrace.schemas.chunks.episodes import Episodes, episodes_of
from headrace.schemas.chunks.spaces import Space, nest
from headrace.schemas.chunks.task import Task, TaskJson
from headrace.schemas.errors import DecodeError, EncodeError, InfosTooLargeError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, Buffer, MessageKind, encode

Infos = Mapping[int, Mapping[int, dict[str, Any]]]
"""Non-empty infos only: chunk row -> observation row within the chunk -> info."""

_FIXED_COLUMNS = ("rewards", "weights_seq", "env_t")


STATE_IN = "state_in/"
"""Prefix of state columns, which have one row for each chunk with steps."""


OFF_POLICY = "off_policy"
"""Column of external envs' batches, bool (T,): the env logged this action and did not ask the policy for it. Its `logp`
is what the policy would have given it, or NaN. Such a step is not a sample of that policy.
"""


MOST_ENDED = 1000
"""Most episodes of each kind, and most agents, that the header of one batch tells: the newest ones."""

CONNECTOR_UPDATE = "_connectors/"
"""Prefix on the wire of the arrays of `ChunkBatch.connector_update`."""


def is_obs_column(name: str) -> bool:
    """Return whether `name` is an observation column.

    Observation columns have T+1 rows for each chunk. Step columns have T.
    """
    return name == "obs" or name.startswith("obs/")


class BatchCounts(BaseModel):
    """The first part of a batch's header: whose batch it is, and how much it holds."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    fleet_id: ChosenName
    slot: Slot
    incarnation: IncarnationOrNone
    seq: Natural
    steps: BatchCount
    chunks: BatchCount


class BatchHeader(BatchCounts):
    """The part of a batch that can be read without array bytes: ids, counts and totals."""

    learner_epoch: EpochOrNone = 0
    weights_seq: WeightsSeq = 0
    weights_digest: str = ""
    agents: ListOf[str] = [DEFAULT_AGENT]
    modules: ListOf[str] = ["default_policy"]
    reasons: ListOf[str] = [""]
    episodes: ListOf[Annotated[tuple[float, Natural], Strict(False)]] = []
    """(return, length) of the newest episodes that ended since the last batch. `totals` counts all."""
    agent_returns: ListOf[float] = Field(default_factory=list)  # pydantic deep-copies a default of []
    """The returns of the newest agents whose episodes ended in this batch, which is of one module; empty in an env of
    one agent, where they would be those of the episodes.
    """
    agent_lengths: ListOf[Natural] = Field(default_factory=list)
    """The agent steps of the same episodes, in the same order; empty from a worker that does not tell them."""
    aborted: Annotated[ListOf[Annotated[tuple[float, Natural], Strict(False)]], Field(max_length=MOST_ENDED)] = Field(
        default_factory=list
    )
    """(return, length) of the newest episodes that ended before their end since the last batch: their env failed, the
    client was lost, or the worker leaves. Older ones are in no count of aborted episodes.
    """
    frozen_agents: Annotated[
        ListOf[Annotated[tuple[ChosenName, float, Natural], Strict(False)]], Field(max_length=MOST_ENDED)
    ] = Field(default_factory=list)
    """(module, return, agent steps) of agents that ended since the last batch and whose steps stay with the worker."""
    tasks: ListOf[TaskJson] = Field(default_factory=list)
    """The distinct tasks of the episodes in this batch."""
    task_of: ListOf[Natural] = Field(default_factory=list)
    """For each chunk, the index of its task + 1, or 0 for no task; empty if no chunk has a task."""
    ended_by_task: Annotated[
        ListOf[Annotated[tuple[TaskName, Positive, float, Natural], Strict(False)]], Field(max_length=MOST_TASKS + 1)
    ] = Field(default_factory=list)
    """(task, episodes, sum of their returns, sum of their lengths) of episodes with a task that ended since the last
    batch.
    """
    totals: WorkerTotals
    """The worker's running totals right after it cut this batch."""

    @property
    def ends(self) -> tuple[int, int]:
        """Return how many episodes it tells that (finished, were aborted): none of the latter if its worker leaves.

        A worker that leaves in order discards open steps, or has only end markers left to send.
        """
        leaves = not self.steps or Discard.SHUTDOWN in self.totals.discarded
        return len(self.episodes), 0 if leaves else len(self.aborted)


@dataclass(frozen=True, eq=False, repr=False)
class ChunkBatch(Sequence[EpisodeChunk]):
    """Several chunks. Iterate over them as `EpisodeChunk`, or read `columns` with `offsets` and `obs_offsets`.

    `order` is the order in which chunks are iterated; None is that of the columns.
    """

    table: NDArray[np.void]
    columns: dict[str, NDArray[Any]]
    observation_space: Space
    action_space: Space
    agents: Sequence[str] = (DEFAULT_AGENT,)
    modules: Sequence[str] = ("default_policy",)
    reasons: Sequence[str] = ("",)
    infos: Infos = field(default_factory=dict)
    slot: int = 0
    incarnation: int = 0
    seq: int = 0
    learner_epoch: int = 0
    weights_digest: str = ""
    order: NDArray[np.intp] | None = None
    connector_update: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """The changes of this module's connectors since its last batch, by name: "env_to_module/0.MeanStd/obs/count". It
    is delivered exactly as often as the batch, and lost with it.
    """
    newest: tuple[int, int] = (0, 0)
    """Newest weights version (learner_epoch, seq) published when the batch was handed out, from which `lag` counts."""
    tasks: Sequence[Task] = ()
    task_of: NDArray[np.int32] | None = None
    """For each chunk, in column order: its task's index in `tasks` + 1, or 0. None if no chunk has a task."""
    episode_ends: tuple[int, int] = (0, 0)
    """How many episodes of envs have (finished, been aborted) since its worker's last batch. An aborted one need not
    have a chunk here. Those that a worker cuts short because it leaves in order do not count.
    """

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Return where each chunk's steps begin in a step column: int64 (chunks + 1,)."""
        return _running(self.table["length"])

    @cached_property
    def obs_offsets(self) -> NDArray[np.int64]:
        """Return where each chunk's observations begin in an observation column: int64 (chunks + 1,)."""
        return self.offsets + self.state_offsets

    @cached_property
    def state_offsets(self) -> NDArray[np.int64]:
        """Return where each chunk's row begins in a state column: int64 (chunks + 1,). An end marker has no row."""
        return _running(self.table["length"] > 0)

    @cached_property
    def lookback_offsets(self) -> NDArray[np.int64]:
        """Return where each chunk's rows begin in a lookback column: int64 (chunks + 1,)."""
        return _running(self.table["lookback"])

    def offsets_of(self, name: str) -> NDArray[np.int64]:
        """Return where each chunk's rows begin in the column `name`: int64 (chunks + 1,)."""
        if is_obs_column(name):
            return self.obs_offsets
        if name.startswith(LOOKBACK):
            return self.lookback_offsets
        return self.state_offsets if name.startswith(STATE_IN) else self.offsets

    @cached_property
    def steps(self) -> int:
        """Return the number of steps in all chunks together."""
        return int(self.table["length"].sum())

    @property
    def has_markers(self) -> bool:
        """Return whether a chunk of no steps is among them: the end marker of an episode of an earlier batch."""
        return bool(np.count_nonzero(self.table["length"]) < len(self.table))

    @cached_property
    def lag(self) -> NDArray[np.int64]:
        """Return by how many versions the weights that chose each step were behind the newest: int64 (steps,).

        Steps that an earlier learner's weights chose, or no weights, are behind all versions of the present learner.
        """
        epoch, seq = self.newest
        if self.learner_epoch != epoch:
            return np.full(self.steps, seq, np.int64)
        behind: NDArray[np.int64] = np.maximum(seq - self.columns["weights_seq"], 0)
        return behind

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all arrays together."""
        return self.table.nbytes + sum(column.nbytes for column in self.columns.values())

    def __repr__(self) -> str:
        of = f"slot {self.slot}, incarnation {self.incarnation}, seq {self.seq}, {', '.join(self.modules):.80}"
        return f"<ChunkBatch of {self.steps} steps in {len(self)} chunks: {of}; columns {', '.join(self.columns):.200}>"

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> EpisodeChunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[EpisodeChunk]: ...
    def __getitem__(self, index: int | slice) -> EpisodeChunk | list[EpisodeChunk]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        index %= len(self)
        return self._chunk(int(self.order[index]) if self.order is not None else index)

    def __iter__(self) -> Iterator[EpisodeChunk]:
        return (self[i] for i in range(len(self)))

    def _chunk(self, i: int) -> EpisodeChunk:
        row = self.table[i]
        steps = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        rows = slice(int(self.obs_offsets[i]), int(self.obs_offsets[i + 1]))
        columns, states, _ = self._apart
        views = {n: c[rows] if is_obs_column(n) else c[steps] for n, c in columns.items()}
        t_start, length = int(row["t_start"]), int(row["length"])
        env_t, task = views.get("env_t"), 0 if self.task_of is None else int(self.task_of[i])
        return EpisodeChunk(
            episode_id=format_episode_id(int(row["id_high"]), int(row["id_low"])),
            chunk_index=int(row["chunk_index"]),
            t_start=t_start,
            obs=nest(self.observation_space, views, "obs"),
            actions=nest(self.action_space, views, "actions"),
            rewards=views["rewards"],
            weights_seq=views["weights_seq"],
            env_t=np.arange(t_start, t_start + length) if env_t is None else env_t,
            end=ChunkEnd(int(row["end"])),
            end_reason=self.reasons[int(row["reason"])] or None,
            columns=_further(views),
            infos=self._chunk_infos(i, length),
            state_in={n: c[self.state_offsets[i]] for n, c in states.items()} if length else {},
            lookback=self._lookback(i, t_start),
            agent_id=self.agents[int(row["agent"])],
            module_id=self.modules[int(row["module"])],
            env_index=int(row["env_index"]),
            slot=self.slot,
            incarnation=self.incarnation,
            seed=None if row["seed"] == UNSEEDED else int(row["seed"]),
            explore=bool(row["flags"] & EXPLORE),
            random_actions=bool(row["flags"] & RANDOM_ACTIONS),
            learner_epoch=self.learner_epoch,
            weights_digest=self.weights_digest,
            episode_return=float(row["episode_return"]),
            episode_length=int(row["episode_length"]),
            task=self.tasks[task - 1] if task else None,
        )

    def _lookback(self, i: int, t_start: int) -> Lookback | None:
        _, _, columns = self._apart
        rows = slice(int(self.lookback_offsets[i]), int(self.lookback_offsets[i + 1])) if columns else slice(0, 0)
        if rows.start == rows.stop:
            return None
        views = {name: column[rows] for name, column in columns.items()}
        env_t = views.get("env_t")
        return Lookback(
            obs=nest(self.observation_space, views, "obs"),
            actions=nest(self.action_space, views, "actions"),
            rewards=views["rewards"],
            weights_seq=views["weights_seq"],
            env_t=np.arange(t_start - rows.stop + rows.start, t_start) if env_t is None else env_t,
            columns=_further(views),
        )

    @cached_property
    def _apart(self) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Return step and observation columns, state columns, and lookback columns; the last two without prefixes."""
        kinds: dict[str, dict[str, NDArray[Any]]] = {STATE_IN: {}, LOOKBACK: {}, "": {}}
        for name, column in self.columns.items():
            prefix = next(prefix for prefix in kinds if name.startswith(prefix))
            kinds[prefix][name.removeprefix(prefix)] = column
        return kinds[""], kinds[STATE_IN], kinds[LOOKBACK]

    def _chunk_infos(self, i: int, length: int) -> list[dict[str, Any]]:
        sparse = self.infos.get(i)
        return [sparse.get(t, {}) for t in range(length + 1)] if sparse and length else []

    def episodes(self) -> Episodes:
        """Return all steps, how each chunk ends, and which one goes on where another is cut; see `Episodes`."""
        return episodes_of((self,))

    def transitions(self) -> Transitions:
        """Return copies of all steps, each with the observation after it; see `Transitions`."""
        return transitions(self)

    def time_major(self) -> TimeMajor:
        """Return copies of the chunks side by side, time first, padded to the longest; see `TimeMajor`."""
        return time_major(self)

    def select(self, keep: NDArray[np.bool_]) -> ChunkBatch:
        """Return a copy with only the chunks where `keep` (bool, one for each chunk in column order) is true."""
        table = self.table[keep]
        used, table["agent"] = np.unique(table["agent"], return_inverse=True)
        return replace(
            self,
            table=table,
            agents=[self.agents[i] for i in used.tolist()] or self.agents,
            columns={n: c[np.repeat(keep, np.diff(self.offsets_of(n)))] for n, c in self.columns.items()},
            infos={new: self.infos[old] for new, old in enumerate(np.flatnonzero(keep).tolist()) if old in self.infos},
            order=None,
            **self._tasks_of(keep),
        )

    def _tasks_of(self, keep: NDArray[np.bool_]) -> dict[str, Any]:
        if self.task_of is None:
            return {}
        used, numbers = np.unique(np.append(0, self.task_of[keep]), return_inverse=True)
        return {"tasks": [self.tasks[i - 1] for i in used[1:].tolist()], "task_of": numbers[1:].astype(np.int32)}

    def by_task(self) -> list[tuple[Task | None, ChunkBatch]]:
        """Split the batch by the task of its chunks. The first part keeps what the connectors learnt."""
        if self.task_of is None:
            return [(None, self)]
        numbers = np.unique(self.task_of).tolist()
        parts = [(self.tasks[i - 1] if i else None, self.select(self.task_of == i)) for i in numbers]
        return [(task, replace(part, connector_update={}) if i else part) for i, (task, part) in enumerate(parts)]

    def emptied(self) -> ChunkBatch:
        """Return the batch without chunks. Its arrays are new: even a view of no rows would keep the whole message."""
        columns = {name: np.empty((0, *column.shape[1:]), column.dtype) for name, column in self.columns.items()}
        bare: dict[str, Any] = {"infos": {}, "order": None, "connector_update": {}, "tasks": (), "task_of": None}
        return replace(self, table=np.empty(0, CHUNK_TABLE), columns=columns, seq=0, **bare)

    def halves(self) -> list[ChunkBatch]:
        """Split the batch in two, in column order; each half has its own infos.

        The first half keeps what the connectors learnt.
        """
        first = np.arange(len(self)) < len(self) // 2
        return [self.select(first), replace(self.select(~first), connector_update={})]


def _further(views: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {n: v for n, v in views.items() if n not in _FIXED_COLUMNS and not belongs_to_space(n)}


def _running(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return 0 and then the running sum of `counts`."""
    steps = np.zeros(len(counts) + 1, np.int64)
    steps[1:] = counts
    return steps.cumsum()


_OFTEN_EMPTY = ("agent_returns", "agent_lengths", "aborted", "frozen_agents", "tasks", "task_of", "ended_by_task")


def encode_batch(batch: ChunkBatch, header: BatchHeader, *, compressed: bool = False) -> list[Buffer]:
    """Return the frames of a BATCH message. Large arrays are not copied. `compressed` is as of `wire.encode`.

    The header's tasks are those of the batch. Raises `EncodeError` as `encode` does, and for infos that are not JSON.
    Raises `InfosTooLargeError` for too many bytes of infos, names of agents or tasks.
    """
    if reserved := [name for name in batch.columns if name.startswith("_")]:
        raise EncodeError(f"column {reserved[0]!r}: names that begin with an underscore are the codec's own")
    arrays: dict[str, NDArray[Any]] = {"_table": batch.table.view(np.uint8), **batch.columns}
    if batch.infos:
        arrays["_infos"] = np.frombuffer(_dump_infos(batch.infos), np.uint8)
    for name, array in batch.connector_update.items():
        arrays[CONNECTOR_UPDATE + name] = array
    fields = {**vars(header), "totals": vars(header.totals)}  # what `model_dump` returns, in a fifth of its time
    if batch.task_of is not None:
        fields["tasks"], fields["task_of"] = [task.as_json() for task in batch.tasks], batch.task_of.tolist()
    for name in _OFTEN_EMPTY:
        if not fields[name]:
            del fields[name]
    return encode(MessageKind.BATCH, fields, arrays, compressed=compressed)


def info_json(info: Any) -> bytes:
    """Return an info as JSON: lists for tuples and arrays, text for keys. Raises `TypeError` for what JSON cannot hold.

    Caution: numbers that are not finite become null.
    """
    return orjson.dumps(info, default=_listed, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _listed(value: Any) -> Any:
    """Return an array that orjson does not read, such as one with strides, as a list."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufUO":
        return value.tolist()
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def _dump_infos(infos: Infos) -> bytes:
    rows = {str(i): {str(t): info for t, info in row.items()} for i, row in infos.items()}
    try:
        written = info_json(rows)
    except TypeError as error:
        raise EncodeError(
            f"an info cannot be written as JSON: {error}; drop the value in the env, or set infos = 'none'"
        ) from error
    if len(written) > DEFAULT_LIMITS.infos_bytes:
        raise InfosTooLargeError(len(written), DEFAULT_LIMITS.infos_bytes)
    return written


_READ_HEADER: Callable[[Mapping[str, Any]], BatchHeader] = BatchHeader.__pydantic_validator__.validate_python
"""`BatchHeader.model_validate`, which handles its options for a seventh of the time."""


def read_batch_header(header: Mapping[str, Any]) -> BatchHeader:
    """Parse the header of a BATCH message. Raises `DecodeError`."""
    try:
        return _READ_HEADER(header)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DecodeError("bad_batch_header", f"{where:.100}: {first['msg']:.200}") from error


def belongs_to_space(name: str) -> bool:
    """Return whether a column holds leaves of the observation or the action space."""
    return is_obs_column(name) or name == "actions" or name.startswith("actions/")
