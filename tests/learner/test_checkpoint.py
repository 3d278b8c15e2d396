"""A checkpoint is whole or not there; damage is named; a learner that was replaced cannot undo the newer one's work."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
import xxhash
from safetensors.numpy import load_file

from headrace.learner_stub.checkpoints.checkpoint import (
    Checkpoint,
    decode_checkpoint,
    load_checkpoint,
    previous_path,
    save_checkpoint,
)
from headrace.learner_stub.reference.ppo import training_arrays, training_tensors
from headrace.schemas.errors import CheckpointError, DecodeError, EncodeError, FencedError, RunDirError
from headrace.schemas.frames import safetensors
from headrace.schemas.frames.safetensors import decode_safetensors, encode_safetensors


class _KilledError(BaseException):
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learner.checkpoint"


def _checkpoint(epoch: int = 1, updates: int = 0) -> Checkpoint:
    arrays = {"small": np.arange(3.0), "large": np.arange(50_000, dtype=np.float32), "scalar": np.array(7, np.int64)}
    position = [{"slot": 0, "incarnation": 1, "settled": {"seq": 4, "committed": [256, 9], "dropped": {}}}]
    return Checkpoint(epoch, position, {"updates": updates}, arrays)


def _assert_equal(read: Checkpoint | None, written: Checkpoint) -> None:
    assert read is not None
    assert (read.epoch, read.position, read.state) == (written.epoch, written.position, written.state)
    assert read.arrays.keys() == written.arrays.keys()
    for name, array in written.arrays.items():
        assert read.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(read.arrays[name], array, strict=True)


def test_a_checkpoint_is_read_as_it_was_written(path: Path) -> None:
    save_checkpoint(path, _checkpoint())
    _assert_equal(load_checkpoint(path), _checkpoint())


def test_without_a_file_there_is_no_checkpoint(path: Path) -> None:
    assert load_checkpoint(path) is None


def test_a_save_keeps_the_previous_checkpoint_and_no_other_file(path: Path) -> None:
    for updates in range(3):
        save_checkpoint(path, _checkpoint(updates=updates))
    _assert_equal(load_checkpoint(path), _checkpoint(updates=2))
    _assert_equal(load_checkpoint(previous_path(path)), _checkpoint(updates=1))
    assert sorted(path.parent.iterdir()) == [path, previous_path(path)]


def test_a_file_without_values_and_one_of_few_bytes_are_told_apart() -> None:
    data = b"".join(encode_safetensors({"empty": np.ones(0)}, {"a": "b"}))
    arrays, metadata = decode_safetensors(data)
    assert (arrays["empty"].shape, metadata) == ((0,), {"a": "b"})
    for size in (0, 7, 8, len(data) - 1):
        with pytest.raises(DecodeError, match=f"it ends within its header, after {size} bytes"):
            decode_safetensors(data[:size])


def test_the_safetensors_library_and_numpy_read_the_checkpoint(path: Path) -> None:
    arrays = {**_checkpoint().arrays, "flags": np.array([True, False]), "none": np.empty((0, 3), np.float16)}
    arrays["turned"] = np.arange(6, dtype=">i4").reshape(2, 3).T
    save_checkpoint(path, Checkpoint(1, [], {}, arrays))
    by_library = load_file(path)
    assert by_library.keys() == arrays.keys()
    for name, array in arrays.items():
        assert by_library[name].shape == array.shape
        np.testing.assert_array_equal(by_library[name], array)
    size = int(np.fromfile(path, "<u8", 1)[0])
    entry = json.loads(path.read_bytes()[8 : 8 + size])["large"]
    raw = np.fromfile(path, "<f4", 50_000, offset=8 + size + entry["data_offsets"][0])
    np.testing.assert_array_equal(raw.reshape(entry["shape"]), arrays["large"])


def test_an_array_that_the_format_cannot_hold_is_named(path: Path) -> None:
    masked = np.ma.array([1.0, 2.0], mask=[True, False])
    for arrays, named in (
        ({"x": np.array([object()])}, "'x' has dtype object"),
        ({"x": masked}, "'x' has masked elements"),
        ({"__metadata__": np.ones(1)}, "__"),
    ):
        with pytest.raises(EncodeError, match=named):
            save_checkpoint(path, Checkpoint(1, [], {}, arrays))


def test_many_large_arrays_fit_in_a_file(path: Path) -> None:
    arrays = {f"layer{i}": np.full(20_000, i, np.float32) for i in range(300)}
    save_checkpoint(path, Checkpoint(1, [], {}, arrays))
    _assert_equal(load_checkpoint(path), Checkpoint(1, [], {}, arrays))


def test_any_damage_is_one_typed_error_that_names_the_file(path: Path) -> None:
    arrays = {"weights": np.arange(40, dtype=np.float32)}
    save_checkpoint(path, Checkpoint(3, [], {"updates": 1}, arrays))
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"learner\.checkpoint cannot be used"):
            load_checkpoint(path)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            read = load_checkpoint(path)
        except CheckpointError as error:
            assert error.path == str(path)  # noqa: PT017
        else:
            _assert_equal(read, Checkpoint(3, [], {"updates": 1}, arrays))  # spaces of JSON carry nothing


def test_loading_a_torn_checkpoint_falls_back_to_the_previous_one(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(path, _checkpoint(updates=1))
    save_checkpoint(path, _checkpoint(updates=2))
    path.write_bytes(path.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING):
        _assert_equal(load_checkpoint(path), _checkpoint(updates=1))
    assert "learner.checkpoint cannot be used: its bytes do not match their checksum" in caplog.text
    assert str(previous_path(path)) in caplog.text


@pytest.mark.parametrize("step", range(6))
def test_a_kill_at_any_step_of_a_save_leaves_a_whole_checkpoint(
    path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(path, _checkpoint(updates=1))
    steps = iter(range(step))

    def until_killed(call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any, **options: Any) -> Any:
            if next(steps, None) is None:
                raise _KilledError
            return call(*args, **options)

        return calling

    with monkeypatch.context() as patch, suppress(_KilledError):
        for owner, name in ((os, "link"), (Path, "replace"), (Path, "unlink")):
            patch.setattr(owner, name, until_killed(getattr(owner, name)))
        save_checkpoint(path, _checkpoint(updates=2))
    assert decode_checkpoint(path.read_bytes(), str(path)).state["updates"] == (2 if step > 4 else 1)
    save_checkpoint(path, _checkpoint(updates=3), claim=True)
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, previous_path(path).name]
    _assert_equal(load_checkpoint(path), _checkpoint(updates=3))


def test_a_kill_between_the_two_moves_of_a_save_leaves_the_previous_checkpoint(path: Path) -> None:
    save_checkpoint(path, _checkpoint(updates=1))
    path.rename(previous_path(path))
    _assert_equal(load_checkpoint(path), _checkpoint(updates=1))


def test_a_checkpoint_whose_folder_cannot_be_read_does_not_count_as_missing(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RunDirError, match="cannot be read: Too many levels of symbolic links"):
        load_checkpoint(tmp_path / "loop" / "learner.checkpoint")


def test_a_save_after_damage_keeps_the_whole_previous_checkpoint(path: Path) -> None:
    for updates in (1, 2):
        save_checkpoint(path, _checkpoint(updates=updates))
    path.write_bytes(path.read_bytes()[:-1])
    save_checkpoint(path, _checkpoint(updates=3))
    _assert_equal(load_checkpoint(previous_path(path)), _checkpoint(updates=1))


def test_a_torn_checkpoint_without_a_previous_one_is_an_error(path: Path) -> None:
    path.write_bytes(b"\1")
    with pytest.raises(CheckpointError, match="move it away to train from the start"):
        load_checkpoint(path)


def test_other_files_are_no_checkpoints(path: Path) -> None:
    parts = '"epoch": 1', '"position": []', '"state": {}'
    odd = '"epoch": -1', '"position": {}', '"state": []'
    for number in range(3):
        for part in ('"other": 0', odd[number]):
            header = "{" + ", ".join([*parts[:number], part, *parts[number + 1 :]]) + "}"
            path.write_bytes(b"".join(encode_safetensors({"w": np.ones(2)}, {"headrace": header})))
            with pytest.raises(CheckpointError, match="whole safetensors file, but no learner's checkpoint"):
                load_checkpoint(path)


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MOST_ARRAYS", 3)
    monkeypatch.setattr(safetensors, "LONGEST_HEADER", 1000)


@pytest.mark.usefixtures("small_bounds")
def test_a_crafted_file_is_refused_before_it_takes_much_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {f"a{i}": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]} for i in range(3)}
    gap = {"a": {"dtype": "U8", "shape": [8], "data_offsets": [1, 9]}}
    many = {f"a{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(4)}
    long = {"a" * 1000: gap["a"]}
    for header, seen in (
        (shared, "its arrays overlap"),
        (gap, "its arrays overlap, or leave bytes between them"),
        (many, "it has 5 entries, and at most 3 arrays are read"),
        (long, r"its header has 1,\d+ bytes, and at most 1,000 are read"),
    ):
        path.write_bytes(_crafted(header, bytes(9)))
        with pytest.raises(CheckpointError, match=f"{path} cannot be used: {seen}"):
            load_checkpoint(path)

    def no_memory(path: Path) -> bytes:
        raise MemoryError

    monkeypatch.setattr("headrace.learner_stub.checkpoints.checkpoint.read_regular", no_memory)
    with pytest.raises(CheckpointError, match=r"its 1,\d+ bytes need more memory than this process can get"):
        load_checkpoint(path)


@pytest.mark.usefixtures("small_bounds")
def test_what_could_not_be_read_again_is_not_written(path: Path) -> None:
    with pytest.raises(EncodeError, match="at most 3 arrays, and these are 4"):
        save_checkpoint(path, Checkpoint(1, [], {}, dict.fromkeys("abcd", np.ones(1))))
    with pytest.raises(EncodeError, match=r"names and metadata take 1,\d+ bytes, and at most 1,000 are read again"):
        save_checkpoint(path, Checkpoint(1, [], {"text": "x" * 1000}, {}))
    assert not list(path.parent.iterdir())


def _crafted(header: dict[str, Any], payload: bytes) -> bytes:
    """A file whose checksum holds."""
    header = {"__metadata__": {"headrace": '{"epoch": 1, "position": [], "state": {}}'}, **header}
    checksum = xxhash.xxh3_64(orjson.dumps(header) + payload).hexdigest()
    header["__metadata__"]["checksum"] = checksum
    body = orjson.dumps(header)
    return len(body).to_bytes(8, "little") + body + payload


def test_a_learner_that_was_replaced_cannot_overwrite_the_newer_ones_checkpoint(path: Path) -> None:
    save_checkpoint(path, _checkpoint(epoch=2, updates=9))
    with pytest.raises(FencedError, match="learner epoch 2; this learner, epoch 1, stops"):
        save_checkpoint(path, _checkpoint(epoch=1, updates=5))
    _assert_equal(load_checkpoint(path), _checkpoint(epoch=2, updates=9))


def test_a_starting_learner_replaces_a_checkpoint_of_any_epoch(path: Path) -> None:
    save_checkpoint(path, _checkpoint(epoch=7))
    save_checkpoint(path, _checkpoint(epoch=1), claim=True)
    _assert_equal(load_checkpoint(path), _checkpoint(epoch=1))


def test_module_and_adam_state_survive_the_file_to_the_bit(path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(3):
        adam.zero_grad()
        net(torch.randn(8, 3)).square().mean().backward()
        adam.step()
    save_checkpoint(path, Checkpoint(1, [], {}, training_arrays(net.state_dict(), adam.state_dict())))
    saved = load_checkpoint(path)
    assert saved is not None
    module, moments = training_tensors(saved.arrays)
    assert module.keys() == net.state_dict().keys()
    for name, tensor in net.state_dict().items():
        assert torch.equal(module[name], tensor)
    for index, expected in adam.state_dict()["state"].items():
        assert moments[index].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(moments[index][name], tensor)


def test_a_starting_learner_removes_half_written_files_of_a_killed_learner(path: Path) -> None:
    orphan = path.with_name(f"{path.name}.4711.new")
    orphan.write_bytes(b"HDRC")
    save_checkpoint(path, _checkpoint(), claim=True)
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"gone cannot be used: the checkpoint cannot be written \(No such file"):
        save_checkpoint(tmp_path / "gone" / "learner.checkpoint", _checkpoint())
