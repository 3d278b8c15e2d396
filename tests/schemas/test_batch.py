"""A batch on the wire and back, for every kind of space; and the contradictions its decoder refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_samples import SPACES, encoded, header_of, make_batch, make_lookback_batch, make_recurrent_batch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.schemas.chunks.batch import ChunkBatch, encode_batch, is_obs_column
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, leaf_values
from headrace.schemas.errors import DecodeError, EncodeError
from headrace.schemas.frames.wire import ALLOWED_DTYPES, OWN_FRAME_BYTES
from headrace.schemas.messages import SupervisorHello
from support.decode_batch import decode_batch

BOX = SPACES["box"]
SIZES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
LEAVES: st.SearchStrategy[Space] = st.one_of(
    st.builds(Box, shape=SIZES, dtype=st.sampled_from(sorted(ALLOWED_DTYPES)), low=st.none() | st.floats(-9, 0)),
    st.builds(Discrete, n=st.integers(1, 9), start=st.integers(-5, 5), dtype=st.sampled_from(["<i8", "<i4", "|u1"])),
    st.integers(0, 3).map(lambda n: MultiDiscrete(nvec=(n + 1,) * n, start=(-n,) * n, shape=(n,))),
    st.builds(MultiBinary, shape=SIZES),
)
SPACE = st.recursive(
    LEAVES,
    lambda sub: (
        st.dictionaries(st.sampled_from(["arm", "eye", "a/b", "", "ü", "_x"]), sub, max_size=3).map(
            lambda d: Dict(spaces=d)
        )
        | st.lists(sub, max_size=3).map(lambda subs: Tuple(spaces=tuple(subs)))
    ),
    max_leaves=5,
)
JSON_INFO = st.dictionaries(st.text(max_size=3), st.integers(-9, 9) | st.text(max_size=3) | st.none(), max_size=2)


@st.composite
def batches(draw: st.DrawFn) -> ChunkBatch:
    """Batches with chunks of every end, end markers, several agents and now and then an info."""
    lengths = draw(st.lists(st.integers(0, 4), max_size=6))
    ends = [ChunkEnd.ABORTED if n == 0 else draw(st.sampled_from(ChunkEnd)) for n in lengths]
    infos: dict[int, dict[int, dict[str, Any]]] = {}
    for i, n in enumerate(lengths):
        if n and draw(st.booleans()):
            infos[i] = draw(st.dictionaries(st.integers(0, n), JSON_INFO, min_size=1, max_size=2))
    return make_batch((draw(SPACE), draw(SPACE)), lengths, ends, infos)


def over_the_wire(batch: ChunkBatch) -> ChunkBatch:
    frames = [bytes(frame) for frame in encoded(batch)]
    header, received = decode_batch(frames, batch.observation_space, batch.action_space)
    assert header == header_of(batch)
    return received


def assert_same(a: Any, b: Any) -> None:
    """The same nesting, dtypes, shapes and values."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b


@settings(max_examples=200)
@given(batch=batches())
def test_every_batch_arrives_as_it_was_sent(batch: ChunkBatch) -> None:
    received = over_the_wire(batch)
    assert_same(received.arrays, batch.arrays)
    np.testing.assert_array_equal(received.table, batch.table)
    for sent, got in zip(batch, received, strict=True):
        for name in type(sent).__slots__:
            assert_same(getattr(sent, name), getattr(got, name))
        assert len(got) == len(got.rewards) == len(got.env_t)
        assert len(got.infos) in (0, len(got) + 1)


@settings(max_examples=100)
@given(batch=batches(), data=st.data())
def test_select_keeps_the_chosen_chunks_and_no_others(batch: ChunkBatch, data: st.DataObject) -> None:
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch))), bool)
    selected = over_the_wire(batch.select(keep))
    kept = [chunk for chunk, k in zip(batch, keep, strict=True) if k]
    assert len(selected) == len(kept)
    for a, b in zip(kept, selected, strict=True):
        for name in ("obs", "actions", "rewards", "columns", "infos", "end", "t_start", "seed"):
            assert_same(getattr(a, name), getattr(b, name))


def test_chunks_have_the_rows_and_table_values_of_their_batch() -> None:
    batch = make_batch(BOX, infos={0: {3: {"success": True}}})
    first, marker, third, last = batch
    assert first.obs.shape == (4, 4)
    assert first.actions.tolist() == [0, 1, 2]
    assert list(first.columns) == ["logp", "logits"]
    assert first.infos == [{}, {}, {}, {"success": True}]
    assert first.is_done
    assert first.is_terminated
    assert (len(marker), len(marker.obs), marker.end, marker.end_reason) == (0, 0, ChunkEnd.ABORTED, "env_exception")
    assert bool(marker)
    assert third.obs[0].tolist() == [16, 17, 18, 19]
    assert (last.agent_id, last.module_id, last.explore, last.is_truncated) == ("blue", "shared", True, True)
    assert repr(third) == "EpisodeChunk(80000000#3, t=200..202, red, ONGOING)"
    assert batch.steps == 6
    assert batch.offsets.tolist() == [0, 3, 3, 5, 6]
    assert batch.obs_offsets.tolist() == [0, 4, 4, 7, 9]


@pytest.mark.parametrize("batch", [*map(make_batch, SPACES.values()), make_recurrent_batch(), make_lookback_batch()])
def test_every_column_has_one_row_for_each_step(batch: ChunkBatch) -> None:
    assert {name: len(column) for name, column in batch.columns.items()} == dict.fromkeys(batch.columns, batch.steps)
    assert {"rewards", "weights_seq", "env_t", "logp", "logits"} < batch.columns.keys()
    observations = leaf_values(batch.observation_space, batch.obs)
    assert {len(array) for array in observations} == {batch.obs_offsets[-1]} == {batch.steps + 3}
    for i, chunk in enumerate(batch):
        for name, column in chunk.columns.items():
            np.testing.assert_array_equal(batch.columns[name][batch.offsets[i] : batch.offsets[i + 1]], column)
    assert {len(array) for array in batch.state_in.values()} <= {batch.state_offsets[-1]}
    assert {len(array) for array in batch.lookback.values()} <= {batch.lookback_offsets[-1]}
    assert len(batch.columns) + len(observations) + len(batch.state_in) + len(batch.lookback) == len(batch.arrays)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("obs", r"batch\.transitions\(\)\.obs, or batch\.obs with batch\.obs_offsets"),
        ("obs/arm", r"batch\.transitions\(\)\.obs, or batch\.obs with batch\.obs_offsets"),
        ("state_in/h", r"batch\.state_in with batch\.state_offsets"),
        ("lookback/obs", r"batch\.lookback with batch\.lookback_offsets"),
        ("log_p", "log_p"),
    ],
)
def test_an_array_of_another_length_is_no_column_and_says_where_it_is(name: str, where: str) -> None:
    batch = make_lookback_batch()
    with pytest.raises(KeyError, match=where):
        batch.columns[name]
    assert name not in batch.columns


def test_a_batch_is_a_sequence() -> None:
    batch = make_batch(BOX)
    assert batch[-1].t_start == 300
    assert [chunk.t_start for chunk in batch[1:3]] == [100, 200]
    with pytest.raises(IndexError, match="chunk 4 of 4"):
        batch[4]


def test_select_takes_chunks_in_any_order_with_their_rows_infos_and_tasks() -> None:
    batch = make_lookback_batch()
    batch = replace(batch, infos={0: {1: {"a": 1}}, 3: {0: {"b": 2}}})
    turned = batch.select(np.array([3, 2, 1, 0]))
    for a, b in zip(reversed(batch), turned, strict=True):
        for name in type(a).__slots__:
            if name != "lookback":
                assert_same(getattr(a, name), getattr(b, name))
    assert [chunk.lookback and len(chunk.lookback) for chunk in turned] == [1, 2, None, None]
    for i, chunk in enumerate(turned):
        np.testing.assert_array_equal(
            turned.columns["rewards"][turned.offsets[i] : turned.offsets[i + 1]], chunk.rewards
        )
    assert [chunk.t_start for chunk in batch.finished_first()] == [0, 300, 100, 200]
    assert turned.select(np.array([True, False, False, True])).finished_first() is not turned


def test_columns_of_a_received_batch_are_views_of_its_frames() -> None:
    batch = make_batch((Box(shape=(OWN_FRAME_BYTES,), dtype="|u1"), Discrete(n=2)))
    frames = encoded(batch)
    _, received = decode_batch(frames, batch.observation_space, batch.action_space)
    assert np.shares_memory(received.arrays["obs"], batch.arrays["obs"])
    assert np.shares_memory(received[0].obs, batch.arrays["obs"])
    with pytest.raises(ValueError, match="read-only"):
        received[0].obs[0] = 1


def test_steps_need_no_env_t_when_they_follow_one_another() -> None:
    batch = make_batch(BOX)
    del batch.arrays["env_t"]
    assert over_the_wire(batch)[2].env_t.tolist() == [200, 201]


def test_infos_may_hold_numpy_numbers_and_nothing_that_needs_code() -> None:
    batch = make_batch(BOX, infos={0: {0: {"x": np.float32(0.5), "y": np.arange(2)}}})
    assert over_the_wire(batch)[0].infos[0] == {"x": 0.5, "y": [0, 1]}
    with pytest.raises(EncodeError, match="set infos = 'none'"):
        encoded(make_batch(BOX, infos={0: {0: {"x": object()}}}))
    with pytest.raises(EncodeError, match="shorten rollout_fragment_length"):
        encoded(make_batch(BOX, infos={0: {0: {"x": "y" * (9 << 20)}}}))


def test_a_column_with_a_name_of_the_codec_is_refused() -> None:
    batch = make_batch(BOX)
    batch.arrays["_secret"] = np.zeros(6)
    with pytest.raises(EncodeError, match="_secret"):
        encoded(batch)


def _set(name: str, value: Any) -> Callable[[ChunkBatch], None]:
    def change(batch: ChunkBatch) -> None:
        batch.table[name][0] = value

    change.__name__ = f"{name} = {value}"
    return change


def _column(name: str, value: Any) -> Callable[[ChunkBatch], None]:
    def change(batch: ChunkBatch) -> None:
        batch.arrays[name] = value

    change.__name__ = f"{name} of {value.dtype} and shape {value.shape}"
    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("agent", 2), "bad_table"),
        (_set("module", 1), "bad_table"),
        (_set("reason", 9), "bad_table"),
        (_set("end", 4), "bad_table"),
        (_set("lookback", 1), "bad_table"),
        (_set("t_start", -1), "bad_table"),
        (_set("t_start", 2**62), "bad_table"),
        (_set("episode_length", -1), "bad_table"),
        (lambda batch: batch.arrays.pop("rewards"), "missing_column"),
        (lambda batch: batch.arrays.pop("obs"), "missing_column"),
        (lambda batch: batch.arrays.pop("actions"), "missing_column"),
        (_column("rewards", np.zeros(5)), "bad_column"),
        (_column("rewards", np.zeros((6, 1))), "bad_column"),
        (_column("rewards", np.zeros(6, np.float32)), "bad_column"),
        (_column("weights_seq", np.zeros(6, np.uint64)), "bad_column"),
        (_column("env_t", np.zeros(6)), "bad_column"),
        (_column("obs", np.zeros((6, 4), np.float32)), "bad_column"),
        (_column("obs", np.zeros((9, 5), np.float32)), "bad_column"),
        (_column("obs", np.zeros((9, 4), np.float64)), "bad_column"),
        (_column("actions", np.zeros((6, 1), np.int64)), "bad_column"),
        (_column("obs/arm", np.zeros(9)), "bad_column"),
        (_column("actions/0", np.zeros(6)), "bad_column"),
        (_column("logp", np.float32(1).reshape(())), "bad_column"),
        (_column("logp", np.zeros(7)), "bad_column"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(change: Callable[[ChunkBatch], None], reason: str) -> None:
    batch = make_batch(BOX)
    header = header_of(batch)
    change(batch)
    with pytest.raises(DecodeError) as caught:
        decode_batch(encode_batch(batch, header), *BOX)
    assert caught.value.reason == reason


INDICES = (0, 1, 255, 256, 257, 299, 300, 511, 65535)
TIMES = (0, 1, 2**62 - 1, 2**62, 2**63 - 1, -1, -(2**63))
TABLE_VALUES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("agent", "module", "reason"), INDICES),
    **dict.fromkeys(("t_start", "episode_length"), TIMES),
    "end": (0, 1, 3, 4, 255),
}


CHANGE = st.sampled_from(sorted(TABLE_VALUES)).flatmap(
    lambda name: st.tuples(st.just(name), st.integers(0, 2), st.sampled_from(TABLE_VALUES[name]))
)


@given(st.lists(CHANGE, min_size=1, max_size=3), st.sampled_from((1, 2, 256, 257, 300, 600)))
@example([("agent", 0, 255), ("agent", 1, 256)], 300)
@example([("t_start", 0, 2**62 - 1), ("episode_length", 1, 2**62 - 1)], 1)
@example([("t_start", 2, -(2**63))], 1)
def test_a_table_is_judged_as_it_would_be_field_by_field(changes: list[tuple[str, int, int]], names: int) -> None:
    batch = make_batch(BOX, (2, 1, 3), (ChunkEnd.ONGOING,) * 3)
    header = header_of(batch)
    values = {name: [0, 0, 0] for name in TABLE_VALUES}
    for name, row, value in changes:
        values[name][row] = value
    for name, three in values.items():
        batch.table[name] = three
    told = [str(i) for i in range(names)]
    header = header.model_copy(update={"agents": told, "modules": told, "reasons": told})
    is_valid = (
        all(max(values[name]) < names for name in ("agent", "module", "reason"))
        and all(0 <= value < 2**62 for name in ("t_start", "episode_length") for value in values[name])
        and max(values["end"]) <= ChunkEnd.ABORTED
    )
    with nullcontext() if is_valid else pytest.raises(DecodeError, match="bad_table"):
        decode_batch(encode_batch(batch, header), *BOX)


@pytest.mark.parametrize("changes", [{"steps": 7}, {"chunks": 3}, {"agents": []}])
def test_a_header_that_contradicts_its_table_is_refused(changes: dict[str, Any]) -> None:
    batch = make_batch(BOX)
    with pytest.raises(DecodeError, match="bad_table"):
        decode_batch(encode_batch(batch, header_of(batch).model_copy(update=changes)), *BOX)


@pytest.mark.parametrize(
    "infos", [{4: {0: {}}}, {-1: {0: {}}}, {0: {4: {}}}, {0: {-1: {}}}, {0: {0: [["a", 1]]}}, {0: []}]
)
def test_infos_that_belong_to_no_observation_are_refused(infos: Any) -> None:
    batch = make_batch(BOX)
    frames = encoded(
        replace(batch, infos={i: dict(row) if isinstance(row, dict) else _Rows() for i, row in infos.items()})
    )
    with pytest.raises(DecodeError, match="bad_infos"):
        decode_batch(frames, *BOX)


class _Rows(dict[int, Any]):
    """Written as JSON where a table of infos should be: a row that holds no info but a number."""

    def items(self) -> Any:
        return [(0, 1)]


def test_a_chunk_of_no_steps_must_be_an_end_marker() -> None:
    with pytest.raises(DecodeError, match="no end marker"):
        over_the_wire(make_batch(BOX, (1, 0), (ChunkEnd.ONGOING, ChunkEnd.ONGOING)))


def test_another_kind_of_message_is_no_batch() -> None:
    with pytest.raises(DecodeError, match="HELLO where BATCH was expected"):
        decode_batch(SupervisorHello(fleet_id="f", token="t").frames(), *BOX)


def test_only_obs_columns_have_a_row_more() -> None:
    assert is_obs_column("obs")
    assert is_obs_column("obs/a")
    assert not is_obs_column("obsolete")


def test_connector_updates_travel_beside_the_columns() -> None:
    update = {"env_to_module/0.MeanStd/obs/mean": np.arange(3.0), "env_to_module/0.MeanStd/obs/count": np.float64([7])}
    batch = replace(make_batch(BOX, [2, 0], [ChunkEnd.ONGOING, ChunkEnd.ABORTED]), connector_update=update)
    received = over_the_wire(batch)
    assert received.connector_update.keys() == update.keys()
    for name, array in update.items():
        np.testing.assert_array_equal(received.connector_update[name], array)
        assert received.connector_update[name].dtype == array.dtype
    assert received.arrays.keys() == batch.arrays.keys()
    assert over_the_wire(make_batch(BOX, [2], [ChunkEnd.ONGOING])).connector_update == {}


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["text"]), np.zeros(2, "datetime64[s]")])
def test_connector_updates_must_be_numbers(array: Any) -> None:
    batch = replace(make_batch(BOX, [2], [ChunkEnd.ONGOING]), connector_update={"env_to_module/0.Mine/x": array})
    with pytest.raises(EncodeError, match=r"_connectors/env_to_module/0\.Mine/x"):
        encoded(batch)


def test_a_batch_is_told_in_one_line() -> None:
    batch = replace(make_batch(BOX, [2, 0, 3], [ChunkEnd.ONGOING, ChunkEnd.ABORTED, ChunkEnd.TERMINATED], {}), slot=3)
    told = f"slot 3, incarnation {batch.incarnation}, seq {batch.seq}, {batch.modules[0]}"
    steps = "rewards (5,), weights_seq (5,), env_t (5,), logp (5,), logits (5, 2)"
    assert repr(batch) == f"<ChunkBatch of 5 steps in 3 chunks: {told}; obs (7, 4), actions (5,), {steps}>"
    assert repr(batch.columns) == f"actions (5,), {steps}"
    columns = {f"obs/{'x' * 50}\n{i}": np.zeros(0) for i in range(99)}
    assert len(repr(replace(batch, arrays=columns))) < 450
    assert "\n" not in repr(replace(batch, arrays=columns))
