"""A batch of chunks in columns: samplers fill it, the wire carries it, learners read it.

Each array holds the rows of all chunks, one chunk after another. `table` has one `CHUNK_TABLE` row for each chunk.

| of `ChunkBatch` | names in `arrays` | rows of chunk i |
|---|---|---|
| `columns` | "actions", "rewards", ... | `offsets[i]:offsets[i+1]`: one for each step |
| `obs` | "obs", "obs/..." | `obs_offsets[i]:obs_offsets[i+1]`: one more, since a chunk has T+1 observations |
| `state_in` | "state_in/..." | `state_offsets[i]`, if the chunk has steps |
| `lookback` | "lookback/...": see `LOOKBACK` | `lookback_offsets[i]:lookback_offsets[i+1]` |

On the wire (`wire.py`) `arrays` are the message's arrays. The table is the array `_table`, `_infos` is JSON, and
`_connectors/...` holds what the connectors learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
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
from headrace.schemas.basics.printable import brief
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
    map_arrays,
    shapes_in_words,
)
from headrace.schemas.chunks.episodes import Episodes, episodes_of, ranges
from headrace.schemas.chunks.info_json import info_json, infos_json, plain_json
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


class StepColumns(Mapping[str, Any]):
    """Arrays with one row for each step, by name. The error for another array names the attribute that has it."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return shapes_in_words(self._columns)

    def __getitem__(self, name: str) -> Any:
        if name in self._columns:
            return self._columns[name]
        if is_obs_column(name):
            own = "batch.obs with batch.obs_offsets (each chunk has one row more than steps)"
            raise KeyError(f"{name!r} is no column of steps; read batch.transitions().obs, or {own}")
        for prefix, at in ((STATE_IN, "state"), (LOOKBACK, "lookback")):
            if name.startswith(prefix):
                raise KeyError(f"{name!r} is no column of steps; read batch.{prefix[:-1]} with batch.{at}_offsets")
        raise KeyError(name)


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
    """Several chunks. Read `transitions()`, iterate over them as `EpisodeChunk`, or read `columns` with `offsets`.

    Chunk i has the rows `offsets[i]:offsets[i+1]`.
    """

    table: NDArray[np.void]
    arrays: dict[str, NDArray[Any]]
    """All arrays by their names on the wire, of several lengths: see `columns`, `obs`, `state_in` and `lookback`."""
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
    connector_update: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """The changes of this module's connectors since its last batch, by name: "env_to_module/0.MeanStd/obs/count". It
    is delivered exactly as often as the batch, and lost with it.
    """
    newest: tuple[int, int] = (0, 0)
    """Newest weights version (learner_epoch, seq) published when the batch was handed out, from which `lag` counts."""
    tasks: Sequence[Task] = ()
    task_of: NDArray[np.int32] | None = None
    """For each chunk: its task's index in `tasks` + 1, or 0. None if no chunk has a task."""
    episode_ends: tuple[int, int] = (0, 0)
    """How many episodes of envs have (finished, been aborted) since its worker's last batch. An aborted one need not
    have a chunk here. Those that a worker cuts short because it leaves in order do not count. A recording has none.
    """

    @cached_property
    def columns(self) -> StepColumns:
        """Return the arrays with one row for each step, by name: actions, rewards, weights_seq, logp, ..."""
        others = (STATE_IN, LOOKBACK)
        return StepColumns({n: a for n, a in self.arrays.items() if not is_obs_column(n) and not n.startswith(others)})

    @cached_property
    def obs(self) -> Any:
        """Return each chunk's T+1 observations, at `obs_offsets`, in the nesting of the observation space."""
        return nest(self.observation_space, self.arrays, "obs")

    @cached_property
    def state_in(self) -> dict[str, NDArray[Any]]:
        """Return a recurrent module's memory before each chunk's first step, by name, at `state_offsets`."""
        return without_prefix(STATE_IN, self.arrays)

    @cached_property
    def lookback(self) -> dict[str, NDArray[Any]]:
        """Return the steps before each chunk, by column name ("obs" too), at `lookback_offsets`."""
        return without_prefix(LOOKBACK, self.arrays)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Return where each chunk's steps begin in `columns`: int64 (chunks + 1,)."""
        return _running(self.table["length"])

    @cached_property
    def obs_offsets(self) -> NDArray[np.int64]:
        """Return where each chunk's observations begin in `obs`: int64 (chunks + 1,)."""
        return self.offsets + self.state_offsets

    @cached_property
    def state_offsets(self) -> NDArray[np.int64]:
        """Return where each chunk's row begins in `state_in`: int64 (chunks + 1,). An end marker has no row."""
        return _running(self.table["length"] > 0)

    @cached_property
    def lookback_offsets(self) -> NDArray[np.int64]:
        """Return where each chunk's rows begin in `lookback`: int64 (chunks + 1,)."""
        return _running(self.table["lookback"])

    def offsets_of(self, name: str) -> NDArray[np.int64]:
        """Return where each chunk's rows begin in `arrays[name]`: int64 (chunks + 1,)."""
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
        behind: NDArray[np.int64] = np.maximum(seq - self.arrays["weights_seq"], 0)
        return behind

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all arrays together."""
        return self.table.nbytes + sum(column.nbytes for column in self.arrays.values())

    def __repr__(self) -> str:
        of = f"slot {self.slot}, incarnation {self.incarnation}, seq {self.seq}, {', '.join(self.modules):.80}"
        return f"<ChunkBatch of {self.steps} steps in {len(self)} chunks: {of}; {shapes_in_words(self.arrays)}>"

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
        return self._chunk(index % len(self))

    def __iter__(self) -> Iterator[EpisodeChunk]:
        return (self[i] for i in range(len(self)))

    def _chunk(self, i: int) -> EpisodeChunk:
        row = self.table[i]
        steps = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        rows = slice(int(self.obs_offsets[i]), int(self.obs_offsets[i + 1]))
        views = {n: c[steps] for n, c in self.columns.items()}
        t_start, length = int(row["t_start"]), int(row["length"])
        env_t, task = views.get("env_t"), 0 if self.task_of is None else int(self.task_of[i])
        return EpisodeChunk(
            episode_id=format_episode_id(int(row["id_high"]), int(row["id_low"])),
            chunk_index=int(row["chunk_index"]),
            t_start=t_start,
            obs=map_arrays(lambda array: array[rows], self.obs),
            actions=nest(self.action_space, views, "actions"),
            rewards=views["rewards"],
            weights_seq=views["weights_seq"],
            env_t=np.arange(t_start, t_start + length) if env_t is None else env_t,
            end=ChunkEnd(int(row["end"])),
            end_reason=self.reasons[int(row["reason"])] or None,
            columns=_further(views),
            infos=self._chunk_infos(i, length),
            state_in={n: c[self.state_offsets[i]] for n, c in self.state_in.items()} if length else {},
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
        start, stop = (int(self.lookback_offsets[at]) for at in (i, i + 1)) if self.lookback else (0, 0)
        if start == stop:
            return None
        views = {name: column[start:stop] for name, column in self.lookback.items()}
        env_t = views.get("env_t")
        return Lookback(
            obs=nest(self.observation_space, views, "obs"),
            actions=nest(self.action_space, views, "actions"),
            rewards=views["rewards"],
            weights_seq=views["weights_seq"],
            env_t=np.arange(t_start - stop + start, t_start) if env_t is None else env_t,
            columns=_further(views),
        )

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

    def select(self, chunks: NDArray[np.bool_] | NDArray[np.intp]) -> ChunkBatch:
        """Return a copy with these chunks alone, in the order of their indices, or where a bool for each is true."""
        keep: NDArray[np.intp] = np.flatnonzero(chunks) if chunks.dtype == np.bool_ else chunks.astype(np.intp)
        table = self.table[keep]
        used, table["agent"] = np.unique(table["agent"], return_inverse=True)
        return replace(
            self,
            table=table,
            agents=[self.agents[i] for i in used.tolist()] or self.agents,
            arrays={name: array[self._rows_of(name, keep)] for name, array in self.arrays.items()},
            infos={new: self.infos[old] for new, old in enumerate(keep.tolist()) if old in self.infos},
            **self._tasks_of(keep),
        )

    def _rows_of(self, name: str, chunks: NDArray[np.intp]) -> NDArray[np.int64]:
        offsets = self.offsets_of(name)
        return ranges(offsets[chunks], np.diff(offsets)[chunks])

    def finished_first(self) -> ChunkBatch:
        """Return the batch with the chunks of finished episodes before the others: itself if it is so, or a copy."""
        done = (self.table["end"] == ChunkEnd.TERMINATED) | (self.table["end"] == ChunkEnd.TRUNCATED)
        return self if done[: np.count_nonzero(done)].all() else self.select(np.argsort(~done, kind="stable"))

    def _tasks_of(self, keep: NDArray[np.intp]) -> dict[str, Any]:
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
        arrays = {name: np.empty((0, *array.shape[1:]), array.dtype) for name, array in self.arrays.items()}
        bare: dict[str, Any] = {"infos": {}, "connector_update": {}, "tasks": (), "task_of": None}
        return replace(self, table=np.empty(0, CHUNK_TABLE), arrays=arrays, seq=0, **bare)

    def halves(self) -> list[ChunkBatch]:
        """Split the batch in two; each half has its own infos. The first half keeps what the connectors learnt."""
        first = np.arange(len(self)) < len(self) // 2
        return [self.select(first), replace(self.select(~first), connector_update={})]

    def smaller(self, excess: int) -> tuple[list[ChunkBatch], list[str]]:
        """Return what to send in place of a batch of `excess` bytes too many, and what its infos then go without.

        It is both halves; of one chunk, the chunk without the largest values of its infos. Nothing: that is too large.
        """
        if len(self) > 1:
            return self.halves(), []
        infos = self.infos.get(0, {})
        sizes = [(len(info_json({key: value})), t, key) for t, info in infos.items() for key, value in info.items()]
        if sum(size for size, *_ in sizes) < excess:
            return [], []
        left_out: dict[tuple[int, str], str] = {}
        for size, t, key in sorted(sizes, key=itemgetter(0), reverse=True):
            if excess <= 0:
                break
            left_out[t, key] = f"info[{brief(key, 40)}] ({size:,} bytes of JSON, in a chunk that is too large)"
            excess -= size
        kept = {t: {key: own for key, own in info.items() if (t, key) not in left_out} for t, info in infos.items()}
        return [replace(self, infos={0: {t: info for t, info in kept.items() if info}})], [*left_out.values()]


def without_prefix(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


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
    if reserved := [name for name in batch.arrays if name.startswith("_")]:
        raise EncodeError(f"column {reserved[0]!r}: names that begin with an underscore are the codec's own")
    arrays: dict[str, NDArray[Any]] = {"_table": batch.table.view(np.uint8), **batch.arrays}
    if batch.infos:
        arrays["_infos"] = np.frombuffer(_dump_infos(batch.infos), np.uint8)
    for name, array in batch.connector_update.items():
        arrays[CONNECTOR_UPDATE + name] = array
    fields = {**vars(header), "totals": {**vars(header.totals)}}  # what `model_dump` returns, in a fifth of its time
    if not header.totals.observations_outside:
        del fields["totals"]["observations_outside"]
    if batch.task_of is not None:
        fields["tasks"], fields["task_of"] = [task.as_json() for task in batch.tasks], batch.task_of.tolist()
    for name in _OFTEN_EMPTY:
        if not fields[name]:
            del fields[name]
    return encode(MessageKind.BATCH, fields, arrays, compressed=compressed)


def _dump_infos(infos: Infos) -> bytes:
    try:
        written = plain_json({str(i): orjson.Fragment(infos_json(row)) for i, row in infos.items()})
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
