"""Reading a recording back: each batch to the bit, on from any position, and of chosen episodes alone."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")

import pyarrow.parquet as pq
from torch.utils.data import DataLoader

from headrace.deploy.annexes.recording import compaction
from headrace.deploy.annexes.recording.recorded_stream import RecordedStream
from headrace.deploy.annexes.recording.recording_folder import RecordingFolder
from headrace.learner_stub import EpisodeStream, LearnerState, StreamDataset, WeightPublisher
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd, format_episode_id
from headrace.schemas.chunks.spaces import Box, Dict, Discrete, Space, Spaces, Tuple
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import ConfigError, ModuleError, RunDirError
from headrace.schemas.frames.wire import ALLOWED_DTYPES
from support.pipeline.same_batches import contents

THOROUGH = (pytest.mark.slow, pytest.mark.thorough)
LENGTHS = (3, 0, 2, 4)
"""0 is the marker of an aborted episode."""
SHAPES = [(), (3,), (2, 3), (4, 4, 3), (0,), (2, 0)]


def of_bytes(random: np.random.Generator, dtype: str, rows: int, shape: tuple[int, ...]) -> Any:
    """Rows of random bytes: floats are NaN with any payload, or denormal, now and then."""
    if dtype == "|b1":
        return random.integers(0, 2, (rows, *shape)).astype(np.bool_)
    size = rows * int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(random.bytes(size), dtype).reshape(rows, *shape)


def make_batch(seq: int, leaf: tuple[str, tuple[int, ...]] = ("<f4", (2,)), **changed: Any) -> ChunkBatch:
    """A batch whose observations are of `leaf`, beside an image, with columns of all kinds of names and forms."""
    random, steps, chunks = np.random.default_rng(seq), sum(LENGTHS), len(LENGTHS)
    states = sum(length > 0 for length in LENGTHS)
    table = np.frombuffer(random.bytes(chunks * CHUNK_TABLE.itemsize), CHUNK_TABLE).copy()
    table["length"], table["lookback"] = LENGTHS, [0, 0, 2, 1]
    table["id_high"], table["id_low"] = 7, [10 * (seq // 2) + i for i in range(chunks)]
    table["agent"], table["module"], table["chunk_index"] = [0, 1, 0, 1], 0, seq
    table["reason"] = [0, 1, 0, 0]
    table["end"] = [ChunkEnd.TERMINATED, ChunkEnd.ABORTED, ChunkEnd.ONGOING, ChunkEnd.TRUNCATED]
    table["episode_return"] = [10.0 * seq + i for i in range(chunks)]
    forms = {"obs/0/arm": leaf, "obs/1": ("|u1", (4, 4, 3)), "actions": ("<i8", ()), "rewards": ("<f8", ())}
    forms |= {f"own/{dtype}/{shape}": (dtype, shape) for dtype in sorted(ALLOWED_DTYPES) for shape in SHAPES}
    forms |= dict.fromkeys(("t", "t_", "end", "agent", "agent_", "task", "infos", "env_t"), ("<i4", ()))
    columns = {
        name: of_bytes(random, dtype, steps + (states if name.startswith("obs") else 0), shape)
        for name, (dtype, shape) in forms.items()
    }
    columns["weights_seq"] = np.arange(steps) + 100 * seq
    columns |= {f"lookback/{name}": of_bytes(random, dtype, 3, shape) for name, (dtype, shape) in forms.items()}
    columns |= {f"state_in/{shape}": of_bytes(random, "<f4", states, shape) for shape in SHAPES}
    box = Box(shape=leaf[1], dtype=leaf[0], low=None, high=None)
    space: Space = Tuple(spaces=(Dict(spaces={"arm": box}), Box(shape=(4, 4, 3), dtype="|u1", low=0, high=255)))
    given: dict[str, Any] = {
        "agents": ["left", "right"],
        "modules": ["default_policy"],
        "reasons": ["", "env_exception"],
        "infos": {0: {1: {"won": True, "x": [1.5, None]}, 3: {}}, 3: {0: {"é": 0.1, "gone": [math.inf, "\0nan"]}}},
        "slot": 3,
        "incarnation": 2,
        "seq": seq,
        "learner_epoch": 4,
        "weights_digest": "abc",
        "newest": (4, seq + 5),
        "connector_update": {"env_to_module/0.Mean/obs": of_bytes(random, "<f8", 2, (2,)), "count": np.array(3)},
        "tasks": [Task((1, 4), {"level": seq}, 2, 1), Task((1, 4), {"level": -1})],
        "task_of": np.array([0, 2, 1, 1], np.int32),
    }
    columns |= changed.pop("columns", {})
    return ChunkBatch(table, columns, space, Discrete(n=2), **given | changed)


def recorded(path: Path, *writes: list[ChunkBatch]) -> Path:
    with RecordingFolder(path) as folder:
        for batches in writes:
            folder.write(batches, [])
    return path


def read(path: Path, **options: Any) -> list[ChunkBatch]:
    with EpisodeStream.of(path, **options) as stream:
        return list(stream)


def without(batch: ChunkBatch, *names: str) -> ChunkBatch:
    return replace(batch, arrays={name: column for name, column in batch.arrays.items() if name not in names})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", sorted(ALLOWED_DTYPES))
def test_a_batch_of_any_dtypes_and_shapes_comes_back_to_the_bit(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    batch = make_batch(1, (dtype, shape))
    (back,) = read(recorded(tmp_path, [batch]))
    assert contents(back) == contents(batch)
    stream = EpisodeStream.of(tmp_path)
    assert contents(next(stream)) == contents(batch)
    assert next(stream, None) is None
    assert re.fullmatch(r"<RecordedStream of \S+: 1 batches, at its end>", repr(stream))
    assert not any(column.flags.writeable for column in back.arrays.values())


@pytest.mark.parametrize("leaf", [("|u1", (80, 80, 4)), ("<f4", (5000,))], ids=str)
def test_wide_observations_come_back_to_the_bit_before_and_after_a_merge(
    tmp_path: Path, leaf: tuple[str, tuple[int, ...]]
) -> None:
    batches = [make_batch(seq, leaf) for seq in (1, 2)]
    path = recorded(tmp_path, batches)
    assert [contents(batch) for batch in read(path)] == [contents(batch) for batch in batches]
    compaction.compact(path, all_now=True)
    assert [contents(batch) for batch in read(path)] == [contents(batch) for batch in batches]


def test_batches_of_several_forms_and_modules_come_back_in_order(tmp_path: Path) -> None:
    wide = {"logp": np.zeros((sum(LENGTHS), 2), np.float32)}
    narrow = {"logp": np.ones(sum(LENGTHS), np.float32)}
    plain: dict[str, Any] = {"tasks": [], "task_of": None, "infos": {}, "connector_update": {}}
    lost = make_batch(8).select(np.array(LENGTHS) == 0)
    batches = [
        make_batch(1, columns=narrow),
        without(make_batch(2), "own/<f4/(3,)", "state_in/()", "lookback/rewards"),
        make_batch(3, columns=wide),
        make_batch(4, modules=["a/b+1"], **plain),
        lost,
        make_batch(5, ("<i2", ()), agents=["one", "two"]),
        without(make_batch(6, **plain), *[name for name in make_batch(6).columns if name.startswith("lookback/")]),
        make_batch(7, columns=narrow),
    ]
    back = read(recorded(tmp_path, batches[:5], batches[5:]))
    assert [batch.seq for batch in back] == [1, 2, 3, 4, 8, 5, 6, 7]
    for own, batch in zip(back, batches, strict=True):
        assert contents(own) == contents(batch)


def test_a_stream_goes_on_from_any_position_and_with_files_that_came_later(tmp_path: Path) -> None:
    batches = [make_batch(seq) for seq in range(1, 7)]
    recorded(tmp_path, batches[:2], batches[2:3], batches[3:5])
    with EpisodeStream.of(tmp_path) as stream:
        positions, told = [stream.position()], []
        while (batch := stream.next(1.0)) is not None:
            told.append(batch.seq)
            positions.append(stream.position())
        assert (told, stream.delivered) == ([1, 2, 3, 4, 5], 5)
        assert stream.ended == f"the recording {tmp_path} has no more batches"
        with RecordingFolder(tmp_path) as folder:
            folder.write(batches[5:], [])
        assert [batch.seq for batch in stream] == [6]
        last = stream.position()
    for place, position in enumerate(positions):
        assert [batch.seq for batch in read(tmp_path, position=position)] == [1, 2, 3, 4, 5, 6][place:]
        with EpisodeStream.of(tmp_path, position=position) as stream:
            stream.next(0.0)
            assert stream.position() == (positions[place + 1] if place < 5 else last)
    with EpisodeStream.of(tmp_path, position=positions[1]) as stream:
        assert [batch.seq for batch in stream.round_of(3)] == [2, 3, 4]
        before = stream.position()
        assert (stream.round_of(3), bool(stream.ended), stream.position()) == ([], True, before)
        assert [batch.seq for batch in stream.round_of(2)] == [5, 6]


def test_a_position_of_another_recording_or_of_a_fleet_is_refused(tmp_path: Path) -> None:
    one = recorded(tmp_path / "one", [make_batch(1), make_batch(2)])
    other = recorded(tmp_path / "other", [make_batch(1), make_batch(3)])
    with EpisodeStream.of(one) as stream:
        assert len(stream.round_of(2)) == 2
        position = stream.position()
    refused = [position, [{"fleet_id": "a", "slot": 0, "incarnation": 1, "settled": 4}], position * 2]
    for wrong in refused:
        with pytest.raises(ConfigError, match=f"position: it is not of the recording {other}"):
            EpisodeStream.of(other, position=wrong)
    with pytest.raises(ConfigError, match="it is of consumer group 'recording', not of 'train'"):
        EpisodeStream("tcp://127.0.0.1:1", position=position)


class Killed(BaseException):
    """Stands for SIGKILL."""


def foreign_rows(path: Path) -> list[int]:
    """Return the rows that a reader finds by the names of the files of steps alone."""
    return [seq for file in sorted(path.glob("steps-*")) for seq in pq.read_table(file)["weights_seq"].to_pylist()]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", range(5))
def test_small_files_are_merged_and_no_kill_shows_a_reader_a_row_twice_or_hides_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The merge is killed at each fifth call that changes the folder, and all readers look before and after each."""
    needless = [name for name in make_batch(1).columns if "own/" in name and not name.startswith("own/<f4")]
    batches = [without(make_batch(seq), *needless) for seq in range(1, 7)]
    batches[2] = replace(batches[2], modules=["a/b"])
    batches[3] = without(batches[3], "own/<f4/(3,)", "state_in/()", "lookback/rewards")
    expected = [contents(batch) for batch in batches]
    monkeypatch.setattr(compaction, "_GROUP_BYTES", 1)
    rename, unlink = Path.replace, Path.unlink
    for kill_at in range(first, 100, 5):
        path = recorded(tmp_path / str(kill_at), batches[:2], batches[2:3], batches[3:5], batches[5:])
        going, calls, foreign = EpisodeStream.of(path), iter(range(kill_at)), [list[int]()]
        assert [contents(batch) for batch in going.round_of(2)] == expected[:2]
        position = going.position()

        def look(path: Path = path, foreign: list[list[int]] = foreign, position: Any = position) -> None:
            foreign.append(foreign_rows(path))
            assert len(foreign[-1]) == len(set(foreign[-1]))
            assert set(foreign[-1]) >= set(foreign[-2]), "rows that a reader saw are gone"
            assert [contents(batch) for batch in read(path)] == expected
            assert [contents(batch) for batch in read(path, position=position)] == expected[2:]

        def changing(call: Any, calls: Any = calls, look: Any = look) -> Any:
            def wrapped(*given: Any, **options: Any) -> Any:
                look()
                if next(calls, None) is None:
                    raise Killed
                result = call(*given, **options)
                look()
                return result

            return wrapped

        killed = False
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", changing(rename))
            patched.setattr(Path, "unlink", changing(unlink))
            try:
                compaction.compact(path, all_now=True)
            except Killed:
                killed = True
        look()
        with RecordingFolder(path) as folder:
            look()
            assert (folder.number, folder.batches) == (4, 6)
            compaction.compact(path, all_now=True)
            look()
            assert [contents(batch) for batch in going] == expected[2:]
        assert sorted(file.name for file in path.rglob("*.parquet")) == [
            "batches-000004.parquet",
            *(
                f"{kind}-000004-{module}.parquet"
                for kind in ("chunks", "steps")
                for module in ("a%2Fb", "default_policy")
            ),
        ]
        assert len(foreign[-1]) == sum(batch.steps for batch in batches)
        if not killed:
            assert kill_at > 20
            return
    raise AssertionError("the merge does not end")


def test_numbers_whose_columns_differ_are_not_merged_and_full_or_old_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"logp": np.zeros((sum(LENGTHS), 2), np.float32)}
    narrow = {"logp": np.ones(sum(LENGTHS), np.float32)}
    batches = [make_batch(seq, columns=wide if seq == 3 else narrow) for seq in range(1, 8)]
    path = recorded(tmp_path, *([batch] for batch in batches[:5]))
    expected = [contents(batch) for batch in batches]

    def merged() -> list[str]:
        compaction.compact(path)
        return sorted(file.name for file in path.glob("batches-*"))

    assert merged() == ["batches-000002.parquet", "batches-000003.parquet"]
    monkeypatch.setattr(compaction, "MERGE_AGE_S", -1.0)
    assert merged()[2:] == ["batches-000005.parquet"]
    monkeypatch.undo()
    with RecordingFolder(path) as folder:
        for batch in batches[5:]:
            folder.write([batch], [])
    assert len(merged()) == 3
    monkeypatch.setattr(compaction, "MERGE_BYTES", 1)
    assert merged()[3:] == ["batches-000006.parquet", "batches-000007.parquet"]
    assert [contents(batch) for batch in read(path)] == expected
    with EpisodeStream.of(path) as stream:
        assert len(stream.round_of(6)) == 6
        position = stream.position()
    assert [contents(batch) for batch in read(path, position=position)] == expected[6:]


def test_files_of_a_module_whose_id_ends_in_another_number_stay(tmp_path: Path) -> None:
    files = {
        number: {f"{kind}-{number:06}-past-000002.parquet" for kind in ("steps", "chunks")}
        | {f"batches-{number:06}.parquet"}
        for number in (1, 2)
    }
    for name in files[1] | files[2]:
        (tmp_path / name).touch()
    compaction.remove_number(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == files[1]


def test_the_oldest_numbers_are_removed_and_a_reader_of_them_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "MERGE_BYTES", 1)
    batches = [make_batch(seq) for seq in range(1, 7)]
    path = recorded(tmp_path, *([batch] for batch in batches[:5]))
    compaction.compact(path)
    recorded(tmp_path, batches[5:])
    with EpisodeStream.of(path) as stream:
        positions = [stream.position() for _ in stream]
    late = EpisodeStream.of(path)
    assert late.next() is not None
    size = sum(file.stat().st_size for file in path.rglob("*.parquet"))
    compaction.remove_oldest(path, size, 1e6)
    assert len(read(path)) == 6
    compaction.remove_oldest(path, 0.6 * size, 1e6)
    assert [batch.seq for batch in read(path)] == [4, 5, 6]
    for place in (3, 4, 5, 6):
        assert [batch.seq for batch in read(path, position=positions[place - 1])] == [4, 5, 6][place - 3 :]
    told = "batches 3 to 3 were removed before they were read, for --max-bytes or --max-age-s; begin at the oldest"
    with pytest.raises(RunDirError, match=told):
        read(path, position=positions[1])
    with pytest.raises(RunDirError, match=told.replace("3 to", "2 to")):
        late.next()
    compaction.remove_oldest(path, size, -1.0)
    assert [batch.seq for batch in read(path)] == [5, 6]
    with RecordingFolder(path) as folder:
        assert (folder.number, folder.batches) == (6, 6)


def ids(batches: list[ChunkBatch]) -> set[int]:
    return {int(row["id_low"]) for batch in batches for row in batch.table}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (lambda episode: episode["end"] == "ABORTED", {1, 11, 21}),
        (lambda episode: episode["reason"] == "env_exception", {1, 11, 21}),
        (lambda episode: episode["episode_return"] > 40, {21, 22, 23}),
        (lambda episode: (episode["task"] or {}).get("level") == 2, {12, 13}),
        (lambda episode: episode["agent"] == "left" and episode["end"] == "ONGOING", {2, 12, 22}),
        (lambda episode: episode["module"] == "b", {20, 21, 22, 23}),
        (lambda episode: episode["newest_weights"] is not None and episode["newest_weights"] < 200, {0, 2, 3}),
        (lambda episode: (episode["oldest_weights"] or 0) >= 400, {20, 22, 23}),
        (lambda episode: False, set()),
    ],
    ids=["end", "reason", "return", "task", "agent", "module", "newest weights", "oldest weights", "none"],
)
def test_chosen_episodes_come_alone(tmp_path: Path, keep: Any, expected: set[int]) -> None:
    """Episodes 0 to 3 are in batch 1 alone; 10 to 13 in batches 2 and 3, which decides; 20 to 23 in batch 4."""
    batches = [make_batch(1), make_batch(2), make_batch(3), make_batch(4, modules=["b"])]
    path = recorded(tmp_path, batches[:2], batches[2:])
    chosen = read(path, keep=keep)
    assert ids(chosen) == expected
    for own in chosen:
        whole = batches[own.seq - 1]
        kept = np.isin(whole.table["id_low"], sorted(expected))
        assert contents(own) == contents(whole if kept.all() else whole.select(kept))
    with EpisodeStream.of(path, keep=keep) as stream:
        taken = [stream.next(0.0)]
        position = stream.position()
    assert [batch.seq for batch in taken if batch] + [b.seq for b in read(path, keep=keep, position=position)] == [
        batch.seq for batch in chosen
    ]


def test_the_table_of_episodes_has_a_row_for_each(tmp_path: Path) -> None:
    """Their later chunks are in a file of their own, as they have another column; its name comes first."""
    path = recorded(tmp_path, [make_batch(2), make_batch(3, columns={"t": np.zeros(sum(LENGTHS))})])
    with RecordedStream(path) as stream:
        rows: list[Mapping[str, Any]] = stream.episodes().to_pylist()
    assert [row["episode_id"] for row in rows] == [format_episode_id(7, number) for number in range(10, 14)]
    assert [row["end"] for row in rows] == ["TERMINATED", "ABORTED", "ONGOING", "TRUNCATED"]
    assert [row["episode_return"] for row in rows] == [30.0, 31.0, 32.0, 33.0]
    assert [(row["oldest_weights"], row["newest_weights"]) for row in rows] == [
        (200, 302),
        (None, None),
        (203, 304),
        (205, 308),
    ]
    assert {row["slot"] for row in rows} == {3}


def test_a_recording_tells_the_spaces_of_its_modules(tmp_path: Path) -> None:
    batches = [make_batch(1), make_batch(2, ("|u1", ()), modules=["b"])]
    with EpisodeStream.of(recorded(tmp_path, batches)) as stream:
        assert stream.module_spaces() == {
            batch.modules[0]: Spaces(observation=batch.observation_space, action=batch.action_space)
            for batch in batches
        }
        assert stream.spaces("b").observation == batches[1].observation_space
        with pytest.raises(ModuleError, match="no module was named"):
            stream.spaces()


def test_a_recording_has_all_verbs_of_a_stream_and_takes_its_options(tmp_path: Path) -> None:
    path = recorded(tmp_path / "recording", [make_batch(1)])
    with EpisodeStream.of(str(path), group="train", steps_per_update=64, auto_commit=False) as stream:
        verbs = {name for name in dir(EpisodeStream) if not name.startswith("_")} - {"of"}
        verbs |= {"auto_commit", "delivered", "group", "rank", "token", "world_size"}
        assert verbs <= set(dir(stream))
        assert [batch.seq for batch in stream] == [1]
        stream.commit()
        state = LearnerState(tmp_path)
        state.save(stream, {"w": np.zeros(1, np.float32)})
    saved = state.load()
    assert saved is not None
    assert read(path, position=saved.position) == []
    with pytest.raises(TypeError, match="a recording has no option 'rounds'"):
        EpisodeStream.of(path, rounds="train")
    with pytest.raises(ConfigError, match="a recording has one reader, and no ranks"):
        EpisodeStream.of(path, rank=1, world_size=2)


def test_a_recording_takes_rank_env_in_a_process_that_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path / "recording", [make_batch(1)])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert [batch.seq for batch in EpisodeStream.of(path, rank="env")] == [1]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="a recording has one reader, and no ranks"):
        EpisodeStream.of(path, rank="env")


def test_a_publisher_says_at_once_that_a_recording_is_no_fleet(tmp_path: Path) -> None:
    path = recorded(tmp_path / "recording", [make_batch(1)])
    with pytest.raises(ConfigError, match=r"recording is a recording and has no fleet; EpisodeStream\.of or"):
        WeightPublisher.of(path)


def numbers_of(batch: ChunkBatch) -> list[int]:
    return batch.columns["weights_seq"].tolist()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize(
    ("workers", "context"),
    [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow), pytest.param(3, "fork", marks=THOROUGH)],
)
def test_a_loader_gives_each_batch_of_a_recording_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, context: str | None
) -> None:
    batches = [make_batch(seq) for seq in range(1, 8)]
    (tmp_path / "runs").mkdir()
    path = recorded(tmp_path / "runs" / "recording", batches[:3], batches[3:])
    assert len(read(path)) == 7, "its threads of Arrow are there before the fork"
    monkeypatch.chdir(tmp_path)
    dataset = StreamDataset("runs/recording", convert=numbers_of)
    monkeypatch.chdir(tmp_path / "runs")
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context)
    for epoch in range(2):
        assert sorted(loader) == [numbers_of(batch) for batch in batches], epoch
    chosen = StreamDataset(path, convert=len, keep=lambda episode: episode["agent"] == "left")
    assert list(DataLoader(chosen, batch_size=None)) == [2] * len(batches)


def test_a_dataset_takes_a_place_and_its_sister_a_stream(tmp_path: Path) -> None:
    path = recorded(tmp_path / "recording", [make_batch(1)])
    with EpisodeStream.of(path) as stream:
        with pytest.raises(ConfigError, match="where: StreamDataset opens its streams itself") as refused:
            StreamDataset(stream)
        (line,) = re.findall("from headrace.* import EpisodeDataset", str(refused.value))
        names = dict[str, Any]()
        exec(line, names)  # noqa: S102
        with pytest.raises(ConfigError, match=r"or for worker processes a StreamDataset\(PLACE\)"):
            ForkingPickler.dumps(names["EpisodeDataset"](stream))
        (steps,) = names["EpisodeDataset"](stream)
        assert len(steps) == sum(LENGTHS)


def test_a_run_directory_is_no_folder_for_a_recording(tmp_path: Path) -> None:
    """`EpisodeStream.of` would not know which of the two is meant."""
    (tmp_path / "broker.json").write_text("{}")
    with pytest.raises(RunDirError, match="it is a run directory; choose another --dir"):
        RecordingFolder(tmp_path)


@pytest.mark.parametrize(
    ("package", "advice"),
    [
        ("raise ModuleNotFoundError(name='pyarrow')", ": pip install 'headrace[record]'"),
        (
            "raise ImportError('it wants NumPy 2.0')",
            ", which cannot be imported: ImportError: it wants NumPy 2.0; install a version that can",
        ),
    ],
    ids=["missing", "broken"],
)
def test_without_pyarrow_a_recording_says_what_to_do(tmp_path: Path, package: str, advice: str) -> None:
    (tmp_path / "batches-000001.parquet").touch()
    (tmp_path / "pyarrow.py").write_text(package)
    script = f"import headrace; headrace.EpisodeStream.of({str(tmp_path)!r})"
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert told.stderr.splitlines()[-1].endswith(f"ConfigError: a recording needs pyarrow{advice}")
