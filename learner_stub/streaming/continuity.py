"""Continuity of episodes at the learner: chunks in order and without gaps, or one ABORTED marker as the end.

A source numbers its batches without holes. While every batch arrives there is nothing to check: only the open episode
in each *place* is kept, in a few array writes for each batch.

A place is an env, an agent there by its name, and the module that plays it. The batches of one module come in order
among themselves; those of another module of the same cut may come before or after.

Where a batch is missing, the next chunk of each place shows whether an episode lost a part. Such an episode is ended by
a marker, and its later chunks are left out. A place without a further chunk is ended with its source.

A learner that began after a source knows the places from which chunks have come since, and those that its checkpoint
has (`schemas/chunks/open_episodes.py`). It takes over the latter after a missing batch, which may have had their end,
and when the source ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.ledger import Count, Discard
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.chunks.open_episodes import OpenEpisodes, in_order, index_of, is_open, open_episodes, stops
from headrace.schemas.chunks.spaces import Spaces, column_dtype, leaf_shape, leaves
from headrace.schemas.chunks.task import Task, stamps
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages import SourceEnd

MOST_PLACES = 1 << 20
"""Most places of one source: envs times agents. Each has a row in a table. A batch may name an env of any index."""
MOST_PLAYERS = 1 << 16
"""Agents of one source, each of a module: their numbers are uint16 in the table."""

_WHOLE = np.dtype((np.void, CHUNK_TABLE.itemsize))
"""A row as mere bytes. numpy picks or copies 512 of these in 5 us, and 512 rows with fields in 110 us."""


@dataclass(frozen=True, slots=True)
class FilteredBatch:
    """The kept part of a batch after a gap, the markers to hand out before it, and the counts of the part left out."""

    batch: ChunkBatch
    markers: ChunkBatch | None
    left_out: Count

    @property
    def parts(self) -> list[ChunkBatch]:
        """Return what is handed out, in order."""
        return [part for part in (self.markers, self.batch) if part is not None and len(part)]


_Places = tuple[NDArray[np.void], dict[tuple[int, int], tuple[int, int]]]
"""By env and player: the newest chunks, and the broken episodes."""


class SourceEpisodes:
    """The episodes of one source (slot, incarnation) that are open at the learner. Each batch is of one module.

    `take` raises `DecodeError` for a batch that names more places than a source may have, and changes nothing then.

    before: what `still_open` returned in an earlier life of this learner, as its checkpoint has it.
    gap_reason: that of the earlier life.
    """

    def __init__(self, *, before: OpenEpisodes | None = None, gap_reason: str = "") -> None:
        self._before = before
        self.gap_reason = gap_reason
        """Reason for which batches of this source are missing; "" while none are."""
        self._open = np.zeros((0, 1), CHUNK_TABLE)
        """By env and player: the newest chunk there. Its `t_start` is where it stops, its `agent` the player."""
        self._players: dict[tuple[str, str], int] = {}
        """(agent, module) -> column of `_open`."""
        self._broken: dict[tuple[int, int], tuple[int, int]] = {}
        """By env and player: the episode that a marker has ended there. Further chunks of it may still arrive."""
        self._waiting: deque[_Places] = deque()
        """After a gap, for each part of a batch that is not handed out yet: `_open` and `_broken` before it."""
        self._resumed: set[str] = set()
        """Modules whose episodes of `_before` are in `_open`."""
        self._templates: dict[str, ChunkBatch] = {}
        """By module: a batch of no chunks with its spaces and columns, from which markers are made."""
        self._tasks: dict[tuple[int, int], Task] = before.tasks_by_episode() if before is not None else {}
        """The tasks of episodes that may be open."""
        if before is not None:
            for chunk in before.chunks():
                if chunk["end"] == ChunkEnd.ABORTED:
                    self._broken[self._place(before, chunk)] = _episode(chunk)

    def take(self, batch: ChunkBatch) -> FilteredBatch:
        """Return the part of the next batch to hand out: all of it as long as no batch before it is missing."""
        if self.gap_reason:
            return self.filter(batch)
        self.observe(batch)
        return FilteredBatch(batch, None, (0, 0))

    def note_handed_out(self) -> None:
        """Note that the next part of a batch is at the learner's user."""
        if self._waiting:
            self._waiting.popleft()

    def observe(self, batch: ChunkBatch) -> None:
        """Note which episodes go on after this batch."""
        if not len(batch):
            return
        rows = self._rows(batch)
        # Chunks of one place stand in order, and numpy keeps the last of repeated indices.
        ordered = rows[in_order(rows)] if batch.has_markers else rows
        # All rows of a source with one player are in column 0.
        columns = ordered["agent"] if len(self._players) > 1 else 0
        self._open.view(_WHOLE)[ordered["env_index"], columns] = ordered.view(_WHOLE)
        if batch.task_of is not None:
            self._note_tasks(batch)

    def filter(self, batch: ChunkBatch) -> FilteredBatch:
        """Keep the chunks of a batch after a gap that continue or begin an episode; leave out the others."""
        rows = self._rows(batch)
        if batch.task_of is not None:
            self._note_tasks(batch)
        self._resume(batch.modules[0])
        keep = np.ones(len(batch), np.bool_)
        aborted: list[np.void] = []
        before = self._open.copy(), dict(self._broken)
        for i in in_order(rows):
            row = rows[i]
            keep[i] = self._continues(row, int(batch.table["t_start"][i]), aborted)
            if keep[i]:
                self._open[row["env_index"], row["agent"]] = row
        kept = batch if keep.all() else batch.select(keep)
        left_out = (batch.steps - kept.steps, len(batch) - len(kept))
        markers = self._markers(batch.modules[0], aborted, self.gap_reason) if aborted else None
        found = FilteredBatch(kept, markers, left_out)
        states = (before, _after_markers(before, aborted)) if aborted else (before,)
        self._waiting.extend(states[: len(found.parts)])
        return found

    def learn(self, end: SourceEnd, spaces: Mapping[str, Spaces]) -> None:
        """Take over, at the end of a source, the open episodes that only the checkpoint has.

        `spaces` are those of all modules. Raises `DecodeError` for rows that contradict each other.
        """
        if self._before is None:
            return
        for module_id in self._before.modules:
            if module_id in spaces:
                if module_id not in self._templates:
                    columns = self._before.columns.get(module_id, {})
                    self._templates[module_id] = _template(end, module_id, spaces[module_id], columns)
                self._resume(module_id)

    def still_open(self) -> OpenEpisodes | None:
        """Return the open episodes for the learner's own checkpoint, and those that a marker has ended.

        None if there is none. An ended one is a row of no steps with ABORTED: its further chunks are still left out.
        After a gap both are as of what `note_handed_out` has told of. Without one the chunks of a batch may come again.
        """
        players, agents, modules = list(self._players), list[str](), list[str]()
        table, broken = self._waiting[0] if self._waiting else (self._open, self._broken)
        known = table[(table["length"] > 0) & (table["end"] == ChunkEnd.ONGOING)]
        ended = np.zeros(len(broken), CHUNK_TABLE)
        for row, (place, episode) in zip(ended, broken.items(), strict=True):
            row["env_index"], row["agent"] = place
            row["id_high"], row["id_low"] = episode
            row["end"] = ChunkEnd.ABORTED
        newest = np.concatenate([known, ended])
        used, index = np.unique(newest["agent"], return_inverse=True)
        for name, names, part in (("agent", agents, 0), ("module", modules, 1)):
            newest[name] = np.array([index_of(players[i][part], names) for i in used], np.uint16)[index]
        columns: dict[str, Any] = {
            module_id: {name: (column.dtype.str, [*column.shape[1:]]) for name, column in batch.arrays.items()}
            for module_id, batch in self._templates.items()
        }
        if self._before is not None:
            older, kept = self._before.chunks(), []
            for i, chunk in enumerate(older):
                agent, module = self._before.agents[chunk["agent"]], self._before.modules[chunk["module"]]
                column = self._players.get((agent, module), int(table.shape[1]))
                if not _is_known((int(chunk["env_index"]), column), table, broken):
                    chunk["agent"], chunk["module"] = index_of(agent, agents), index_of(module, modules)
                    kept.append(i)
            newest, columns = np.concatenate([newest, older[kept]]), {**self._before.columns, **columns}
        tasks = [self._tasks.get(_episode(row)) for row in newest] if self._tasks else []
        return open_episodes(newest, agents, modules, columns, tasks) if len(newest) else None

    def _note_tasks(self, batch: ChunkBatch) -> None:
        """Keep the tasks of a batch's episodes. Forget those of episodes that are over, from time to time."""
        assert batch.task_of is not None, "the caller has looked"
        if len(self._tasks) > 2 * self._open.size + len(batch):
            rows = self._open.ravel() if self._before is None else np.append(self._open, self._before.chunks())
            known = set(zip(rows["id_high"].tolist(), rows["id_low"].tolist(), strict=True))
            self._tasks = {episode: task for episode, task in self._tasks.items() if episode in known}
        ids = zip(batch.table["id_high"].tolist(), batch.table["id_low"].tolist(), strict=True)
        for episode, number in zip(ids, batch.task_of.tolist(), strict=True):
            if number:
                self._tasks[episode] = batch.tasks[number - 1]

    def _place(self, told: OpenEpisodes, chunk: np.void) -> tuple[int, int]:
        """Return env and player of a row of `told`."""
        player = told.agents[chunk["agent"]], told.modules[chunk["module"]]
        return int(chunk["env_index"]), self._players.setdefault(player, len(self._players))

    def _knows(self, env_index: int, player: tuple[str, str]) -> bool:
        """Return whether a chunk came from this place."""
        column = self._players.get(player, self._open.shape[1])
        return _is_known((env_index, column), self._open, self._broken)

    def end(self, reason: str) -> list[ChunkBatch]:
        """End all open episodes, since no more batches come from this source.

        Return one batch of markers for each module with an open episode.
        """
        by_module: dict[str, list[np.void]] = {}
        modules = [module_id for _, module_id in self._players]
        known = self._open[(self._open["length"] > 0) & (self._open["end"] == ChunkEnd.ONGOING)]
        for row in known:
            by_module.setdefault(modules[row["agent"]], []).append(row)
        self._open = np.zeros((0, 1), CHUNK_TABLE)
        return [self._markers(module_id, rows, reason) for module_id, rows in by_module.items()]

    def _resume(self, module_id: str) -> None:
        """Go on from the checkpoint where no chunk of this module has come since."""
        if self._before is None or module_id in self._resumed:
            return
        self._resumed.add(module_id)
        for chunk in self._before.chunks():
            agent, env_index = self._before.agents[chunk["agent"]], int(chunk["env_index"])
            if self._before.modules[chunk["module"]] != module_id or self._knows(env_index, (agent, module_id)):
                continue
            self._check_places(env_index + 1, [(agent, module_id)])
            place = self._place(self._before, chunk)
            self._grow(env_index + 1)
            self._open[place] = chunk
            self._open[place]["agent"] = place[1]

    def _rows(self, batch: ChunkBatch) -> NDArray[np.void]:
        """Return the batch's table in the form of `_open`, which is made wide enough for it."""
        (module_id,) = batch.modules
        envs = int(batch.table["env_index"].max(initial=0)) + 1
        named = [(agent, module_id) for agent in batch.agents]
        if envs > len(self._open) or not self._players.keys() >= set(named):
            self._check_places(envs, named)
            for player in named:
                self._players.setdefault(player, len(self._players))
            self._grow(envs)
        if module_id not in self._templates:
            self._templates[module_id] = batch.emptied()
        rows = batch.table.view(_WHOLE).copy().view(CHUNK_TABLE)
        players = [self._players[player] for player in named]
        if players != list(range(len(players))):
            rows["agent"] = np.array(players, np.uint16)[rows["agent"]]
        rows["t_start"] = stops(batch.table, batch.arrays.get("env_t"))
        return rows

    def _check_places(self, envs: int, players: Sequence[tuple[str, str]]) -> None:
        """Raise `DecodeError` for a batch with which this source would have more places than any worker has."""
        count = len(self._players) + sum(player not in self._players for player in players)
        places = max(envs, self._open.shape[0]) * count
        if places > MOST_PLACES or count > MOST_PLAYERS:
            detail = f"{envs} envs and {count} agents by name; {MOST_PLACES} places and {MOST_PLAYERS} agents at most"
            raise DecodeError("bad_table", detail)

    def _grow(self, envs: int) -> None:
        players = len(self._players)
        if self._open.shape[0] < envs or self._open.shape[1] < players:
            shape = (max(self._open.shape[0], envs), max(self._open.shape[1], players))
            grown = np.zeros(shape, CHUNK_TABLE)
            grown[: self._open.shape[0], : self._open.shape[1]] = self._open
            self._open = grown

    def _continues(self, row: np.void, begins: int, aborted: list[np.void]) -> bool:
        """Return whether a chunk continues what the learner has; abort an open episode there that cannot go on."""
        place, episode = _place_of(row), _episode(row)
        last = self._open[place]
        if is_open(last):
            # Chunks up to the last one come again after a checkpoint of an older version, made before their batch.
            if _episode(last) == episode and row["chunk_index"] <= last["chunk_index"] + 1:
                return True
            aborted.append(last.copy())
            self._broken[place] = _episode(last)
            self._open[place] = np.zeros((), CHUNK_TABLE)
        if row["chunk_index"] == 0:
            self._broken.pop(place, None)
            return True
        if self._broken.get(place) != episode:
            # The episode began in a missing batch, or at this learner's predecessor, whose user must get its end.
            self._broken[place] = episode
            aborted.append(_just_before(row, begins))
        return False

    def _markers(self, module_id: str, rows: Sequence[np.void], reason: str) -> ChunkBatch:
        """Make one ABORTED chunk of no steps after each of `rows`, all of one module."""
        names = [agent for agent, _ in self._players]
        table = np.array(rows, CHUNK_TABLE)
        players, table["agent"] = np.unique(table["agent"], return_inverse=True)
        table["chunk_index"] += 1
        table["length"] = table["lookback"] = table["module"] = 0
        table["end"] = ChunkEnd.ABORTED
        table["reason"] = 1
        agents = [names[player] for player in players]
        tasks, task_of = stamps([self._tasks.get(_episode(row)) for row in table]) if self._tasks else ((), None)
        ends = (0, 0 if reason == Discard.SHUTDOWN else len(np.unique(table["env_index"])))
        template = replace(self._templates[module_id], table=table, agents=agents, episode_ends=ends)
        return replace(template, reasons=("", reason), tasks=tasks, task_of=task_of)


def _template(end: SourceEnd, module_id: str, spaces: Spaces, told: Mapping[str, Any]) -> ChunkBatch:
    """Return a batch of no chunks with the columns that the worker told of, and those that its spaces ask for."""
    forms = {name: (dtype, tuple(shape)) for name, (dtype, shape) in told.items() if not name.startswith("_")}
    columns = {name: np.empty((0, *shape), dtype) for name, (dtype, shape) in forms.items()}
    for leaf_name, leaf in (*leaves(spaces.observation, "obs"), *leaves(spaces.action, "actions")):
        columns[leaf_name] = np.empty((0, *leaf_shape(leaf)), column_dtype(leaf))
    columns |= {"rewards": np.empty(0), "weights_seq": np.empty(0, np.int64)}
    return ChunkBatch(
        table=np.empty(0, CHUNK_TABLE),
        arrays=columns,
        observation_space=spaces.observation,
        action_space=spaces.action,
        modules=(module_id,),
        slot=end.slot,
        incarnation=end.incarnation,
    )


def _is_known(
    place: tuple[int, int], newest: NDArray[np.void], broken: Mapping[tuple[int, int], tuple[int, int]]
) -> bool:
    """Return whether these tables show that a chunk came from this place."""
    if place in broken:
        return True
    inside = place[0] < newest.shape[0] and place[1] < newest.shape[1]
    return inside and _episode(newest[place]) != (0, 0)


def _after_markers(before: _Places, aborted: Sequence[np.void]) -> _Places:
    """Return the places once markers have ended these episodes."""
    newest, broken = before[0].copy(), dict(before[1])
    for row in aborted:
        newest[_place_of(row)] = np.zeros((), CHUNK_TABLE)
        broken[_place_of(row)] = _episode(row)
    return newest, broken


def _place_of(row: np.void) -> tuple[int, int]:
    return int(row["env_index"]), int(row["agent"])


def _episode(row: np.void) -> tuple[int, int]:
    return int(row["id_high"]), int(row["id_low"])


def _just_before(row: np.void, begins: int) -> np.void:
    """Return a row for an imagined chunk that ends where `row` begins."""
    before = row.copy()
    before["t_start"] = begins
    before["chunk_index"] -= 1
    before["length"] = 0
    return before
