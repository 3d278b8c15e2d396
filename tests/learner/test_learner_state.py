"""A user's own learner resumes from its saved state to the bit; a value that cannot be saved is an error."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from torch import nn

import headrace
from headrace.deploy.annexes.recording.recorded_stream import RecordedStream
from headrace.learner_stub import LearnerState
from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, load_checkpoint, published_arrays, save_checkpoint
from headrace.learner_stub.checkpoints.learner_state import save_policy
from headrace.schemas.errors import (
    CheckpointError,
    ConfigError,
    EncodeError,
    FencedError,
    ModuleError,
    NotFiniteError,
    RunDirError,
    UnreachableError,
    WeightsMismatchError,
)
from headrace.schemas.frames.safetensors import decode_safetensors, encode_safetensors

PLACE = {"slot": 0, "incarnation": 1, "settled": {"seq": 3, "committed": [96, 3], "dropped": {}}}


class Stream:
    """The part of a stream that a saved state needs."""

    def __init__(self, epoch: int = 1, group: str = "train") -> None:
        self.epoch = epoch
        self.group = group

    def position(self) -> list[dict[str, Any]]:
        return [PLACE]


class Learner:
    """A module, an optimizer, a schedule and random streams, and a step that uses all of them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=50)
        self.numpy, self.python = np.random.default_rng(seed), random.Random(seed)

    def step(self) -> None:
        inputs = torch.randn(8, 3) * self.numpy.normal() + self.python.random()
        self.optimizer.zero_grad()
        self.module(inputs).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()

    def save(self, state: LearnerState) -> None:
        state.save(
            Stream(),
            self.module.state_dict(),
            updates=3,
            steps=96,
            optimizer=self.optimizer.state_dict(),
            schedule=self.schedule.state_dict(),
            random=[torch.get_rng_state(), self.numpy.bit_generator.state, self.python.getstate()],
        )

    def load(self, state: LearnerState) -> None:
        saved = state.load()
        assert saved is not None
        assert (saved.updates, saved.steps, saved.position) == (3, 96, [PLACE])
        self.module.load_state_dict(saved.policy)
        self.optimizer.load_state_dict(saved.more["optimizer"])
        self.schedule.load_state_dict(saved.more["schedule"])
        of_torch, self.numpy.bit_generator.state, of_python = saved.more["random"]
        torch.set_rng_state(of_torch)
        self.python.setstate(of_python)


def test_a_restarted_learner_takes_the_same_steps_to_the_bit(tmp_path: Path) -> None:
    first, state = Learner(1), LearnerState(tmp_path)
    assert state.load() is None
    for _ in range(3):
        first.step()
    first.save(state)
    first.step()
    second = Learner(2)
    second.load(LearnerState(tmp_path))
    second.step()
    for name, tensor in first.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[name], tensor), name


def test_several_modules_load_by_id_and_have_published_arrays(tmp_path: Path) -> None:
    state = LearnerState(tmp_path)
    policies = {name: {"weight": torch.full((2,), float(i))} for i, name in enumerate(("chaser", "runner"))}
    policies["chaser"]["connectors/env_to_module/0.MeanStd/count"] = np.array([7])  # type: ignore[assignment]
    state.save(Stream(), policies, odd={1: math.inf, 2: 1 << 90})
    saved = state.load()
    assert saved is not None
    assert {module_id: sorted(own) for module_id, own in saved.policy.items()} == {
        "chaser": ["connectors/env_to_module/0.MeanStd/count", "weight"],
        "runner": ["weight"],
    }
    assert torch.equal(saved.policy["runner"]["weight"], torch.ones(2))
    assert saved.more["odd"] == {1: math.inf, 2: 1 << 90}
    whole = load_checkpoint(tmp_path / "learner.checkpoint")
    assert whole is not None
    assert sorted(published_arrays(whole.arrays)) == [
        "modules/chaser/connectors/env_to_module/0.MeanStd/count",
        "modules/chaser/weight",
        "modules/runner/weight",
    ]


def test_a_learner_that_was_replaced_cannot_save(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(1)}
    first, second = LearnerState(tmp_path), LearnerState(tmp_path)
    first.save(Stream(epoch=1), weights)
    second.save(Stream(epoch=2), weights)
    with pytest.raises(FencedError, match="learner epoch 2; this learner, epoch 1, stops"):
        first.save(Stream(epoch=1), weights)


def test_the_first_save_takes_over_the_file_that_was_there_but_not_a_successors(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(1)}
    LearnerState(tmp_path).save(Stream(epoch=4), weights)
    replaced, successor = LearnerState(tmp_path), LearnerState(tmp_path)
    successor.save(Stream(epoch=2), weights)  # of a fleet whose epochs were lost
    with pytest.raises(FencedError, match="learner epoch 2; this learner, epoch 1, stops"):
        replaced.save(Stream(epoch=1), weights)
    replaced.load()  # as after figures that are not finite
    with pytest.raises(FencedError):
        replaced.save(Stream(epoch=1), weights)
    LearnerState(tmp_path).save(Stream(epoch=1), weights)


def test_another_groups_reader_does_not_write_over_the_learners_checkpoint(tmp_path: Path) -> None:
    own, reader = tmp_path / "of" / "evaluation", Stream(group="evaluate")
    (tmp_path / "broker.json").touch()
    with pytest.raises(ConfigError, match="is the learner's; save the state of group 'evaluate' in another folder"):
        LearnerState(tmp_path).save(reader, {"weight": torch.ones(1)})
    assert LearnerState(own).save(reader, {"weight": torch.ones(1)}).exists(), "the save makes the folder"


@pytest.mark.parametrize(
    "value",
    [
        object(), {"inner": [{1, 2}]}, lambda: 0, np.array([object()]), np.ma.array([1.0, 2.0], mask=[True, False]),
        torch.zeros(1).to(torch.float8_e4m3fn), torch.zeros(1, device="meta"), {1 << 3301: 0},
        pytest.param({10**5000: 0}, id="a key of 5,000 digits"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_saved_raises_encode_error(tmp_path: Path, value: Any) -> None:
    with pytest.raises(EncodeError, match=r"cannot be saved|cannot hold"):
        LearnerState(tmp_path).save(Stream(), {"weight": torch.ones(1)}, odd=value)


def test_a_saved_policy_has_no_further_values(tmp_path: Path) -> None:
    save_policy(tmp_path, {"weight": torch.ones(1)}, updates=4)
    saved = LearnerState(tmp_path).load()
    assert saved is not None
    assert (list(saved.policy), saved.updates, saved.position, saved.more) == (["weight"], 4, [], {})


@pytest.mark.parametrize(
    "tree",
    [{"_tensor": "own/9"}, {"_tensor": 3}, {"_items": [[1]]}, {"_tuple": 4}, {"_number": "x"}, {"_number": "9" * 2000}],
)
def test_a_tree_that_does_not_fit_its_arrays_is_a_typed_error(tmp_path: Path, tree: Any) -> None:
    save_checkpoint(tmp_path / "learner.checkpoint", Checkpoint(1, [], {"own": {"odd": tree}}, {"w": np.ones(1)}))
    with pytest.raises(CheckpointError, match=r"learner\.checkpoint cannot be used"):
        LearnerState(tmp_path).load()


def test_deep_nesting_is_a_typed_error(tmp_path: Path) -> None:
    path = save_policy(tmp_path, {"weight": torch.ones(1)})
    arrays, metadata = decode_safetensors(path.read_bytes())
    tree: Any = 0
    for _ in range(200):
        tree = [tree]
    header = orjson.loads(metadata["headrace"]) | {"state": {"own": tree}}
    path.write_bytes(b"".join(encode_safetensors(arrays, {"headrace": orjson.dumps(header).decode()})))
    with pytest.raises(CheckpointError, match="nested deeper"):
        LearnerState(tmp_path).load()


def test_a_learner_state_needs_a_running_fleet(tmp_path: Path) -> None:
    (tmp_path / "broker.json").write_bytes(orjson.dumps({"endpoints": {"learner": "tcp://127.0.0.1:1"}}))
    (tmp_path / "fleet.json").write_bytes(orjson.dumps({"state": "starting"}))
    with pytest.raises(UnreachableError, match="has no broker yet: start it with"):
        LearnerState.of(tmp_path, connect_timeout_s=0.3)
    (tmp_path / "fleet.json").write_bytes(orjson.dumps({"state": "running"}))
    assert LearnerState.of(tmp_path).load() is None


def test_a_policy_that_is_not_finite_does_not_replace_the_last_finite_one(tmp_path: Path) -> None:
    state, bad = LearnerState(tmp_path), {"w": torch.tensor([1.0, math.nan])}
    state.save(Stream(), {"w": torch.ones(2)}, updates=1)  # type: ignore[arg-type]
    with pytest.raises(NotFiniteError, match="1 of 2 values of 'w'"):
        state.save(Stream(), bad, updates=2)  # type: ignore[arg-type]
    with pytest.raises(NotFiniteError, match="1 of 2 values of 'w'"):
        save_policy(tmp_path, bad, updates=2)
    saved = state.load()
    assert saved is not None
    assert saved.updates == 1
    save_policy(tmp_path, bad, updates=2, allow_non_finite=True)
    saved = state.load()
    assert saved is not None
    assert saved.updates == 2


MODULE = {"head.weight": torch.ones(2, 3), "head.bias": torch.ones(2), "steps": torch.tensor(4)}
NOTES = {"default_policy": {"head.weight": [2, 3], "head.bias": [2], "steps": []}}, {"default_policy": "ffi"}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "others": ({"a": torch.zeros(3)}, r"missing \['head\.bias', 'head\.weight', 'steps'\], unknown \['a'\]"),
    "more": ({**MODULE, "critic.w": torch.ones(2)}, r"missing \[\], unknown \['critic\.w'\]"),
    "a-part": ({"head.bias": torch.ones(2)}, r"missing \['head\.weight', 'steps'\]"),
    "shape": ({**MODULE, "head.bias": torch.ones(3)}, r"'head\.bias' has shape \(3,\), the module's \(2,\)"),
    "dtype": ({**MODULE, "steps": torch.tensor(0.5)}, r"'steps' is float32, the module's int"),
    "connectors-alone": ({"connectors/env_to_module/0.MeanStd/count": np.ones(1)}, r"missing \['head\.bias'"),
    "of-several": ({"one": MODULE, "two": MODULE}, r"there is no module 'one|two'; this fleet's modules are"),
}


def note_module(folder: Path) -> None:
    """Write what a broker notes of the module that its workers have told of."""
    shapes, kinds = NOTES
    (folder / "broker.json").write_bytes(orjson.dumps({"weight_shapes": shapes, "weight_kinds": kinds}))


@pytest.mark.parametrize("known_by", ["workers", "file"])
@pytest.mark.parametrize("unfit", UNFIT)
def test_weights_of_another_module_than_the_runs_replace_no_file(tmp_path: Path, unfit: str, known_by: str) -> None:
    given, why = UNFIT[unfit]
    for updates in (1, 2):
        save_policy(tmp_path, MODULE, updates=updates)
    if known_by == "workers":
        note_module(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    state = LearnerState(tmp_path)
    for save in (save_policy, partial(state.save, Stream())):  # type: ignore[arg-type]
        target: Any = save
        with pytest.raises(ModuleError, match=rf"nothing is saved to {tmp_path}/learner\.checkpoint.*{why}"):
            target(*([tmp_path] if save is save_policy else []), given)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_of_another_module_than_the_workers_have_is_replaced_by_theirs(tmp_path: Path) -> None:
    save_policy(tmp_path, {"a": torch.zeros(3)})
    with pytest.raises(WeightsMismatchError, match="which has a policy; to save another one there, move it away: "):
        save_policy(tmp_path, MODULE)
    note_module(tmp_path)
    save_policy(
        tmp_path,
        {f"module.{name}": tensor.double() for name, tensor in MODULE.items() if name != "steps"}
        | {"module.steps": torch.tensor(4, dtype=torch.int32)},
    )
    saved = LearnerState(tmp_path).load()
    assert saved is not None
    assert saved.policy["module.head.bias"].tolist() == [1.0, 1.0]


def test_the_first_save_of_a_run_must_fit_its_workers(tmp_path: Path) -> None:
    note_module(tmp_path)
    with pytest.raises(WeightsMismatchError, match=r"missing \['head\.bias'"):
        save_policy(tmp_path, {"a": torch.zeros(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["broker.json"]
    save_policy(tmp_path, {"default_policy": MODULE})


@pytest.mark.parametrize(
    "call",
    [
        *(LearnerState, headrace.EpisodeStream.of, headrace.WeightPublisher.of, headrace.TaskPublisher.of),
        *(headrace.load_policy, RecordedStream, lambda path: headrace.fleet("CartPole-v1", run_dir=path)),
        lambda path: save_policy(path, nn.Linear(1, 1).state_dict()),
        lambda path: headrace.EpisodeStream.of(f"{path}/meet.json"),
        lambda path: headrace.EpisodeStream("tcp://127.0.0.1:1", keys=path),
    ],
)
def test_a_relative_path_in_a_working_directory_that_was_removed_is_a_sentence(
    call: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(RunDirError, match="cannot be found: the working directory was removed; change to another"):
        call("runs/x")


@pytest.mark.parametrize("name", ["x", "a/x", "./x"])
def test_a_state_stays_in_its_folder_when_the_working_directory_changes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trial").mkdir()
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    state = LearnerState(name)
    monkeypatch.chdir(tmp_path / "trial")
    saved = state.save(Stream(), nn.Linear(1, 1).state_dict(), number=3)  # type: ignore[arg-type]
    assert saved == tmp_path / name / "learner.checkpoint"
    monkeypatch.chdir(tmp_path)
    loaded = LearnerState(name).load()
    assert loaded is not None
    assert loaded.more == {"number": 3}
