"""A stream as a dataset of torch: in a `DataLoader`, over a restart with a checkpoint, and after the end of a fleet."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from torch.utils.data import DataLoader

from headrace.learner_stub import EpisodeStream, LearnerState, StreamDataset, WeightPublisher
from headrace.learner_stub.adapters.torch_dataset import EpisodeDataset
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import ConfigError
from support.pipeline.delivery import BrokerThread, Envs, Process, StartFeeder
from support.pipeline.rank_process import told
from support.waiting import TIMEOUT_S, wait_until

OpenStream = Callable[..., EpisodeStream]


@pytest.fixture
def open_stream(stack: ExitStack, broker: BrokerThread) -> OpenStream:
    """`open_stream(...)`: a stream from the broker, on which a loop ends after a second without a batch."""
    return lambda **settings: stack.enter_context(
        EpisodeStream(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S, batch_timeout_s=1.0, **settings)
    )


def loader(stream: EpisodeStream) -> Any:
    return DataLoader(EpisodeDataset(stream), batch_size=None)


def test_a_loader_gives_every_step_and_leaves_end_markers_out(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    batches: list[ChunkBatch] = []
    for batch in Envs(2, fails=0.1).fragments(12):
        has_steps = batch.table["length"] > 0
        batches += [batch] if has_steps.all() else [batch.select(has_steps), batch.select(~has_steps)]
    assert len(batches) > 12
    feeder = start_feeder(broker.endpoints.worker, batches)
    stream = open_stream()
    items = list(loader(stream))
    assert sum(len(item) for item in items) == sum(batch.steps for batch in batches)
    assert all(len(item) and isinstance(item.next_obs, torch.Tensor) for item in items)
    items[0].obs.add_(1.0)  # its own memory
    assert stream.delivered == len(batches) > len(items)
    stream.commit()
    wait_until(feeder.all_settled, "the settlement of all batches, with that of the markers")


_FORKS = """
import sys
from torch.utils.data import DataLoader
from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.adapters.torch_dataset import EpisodeDataset
from headrace.schemas.errors import ConfigError

with EpisodeStream(sys.argv[1], batch_timeout_s=1.0) as stream:
    dataset = EpisodeDataset(stream)
    try:
        next(iter(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")))
    except ConfigError as error:
        print(str(error).replace("\\n", " "))
    print(sum(len(steps) for steps in DataLoader(dataset, batch_size=None)))
"""
"""A process of its own: one with other threads must not fork."""


def test_worker_processes_are_refused_and_take_nothing(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    batches = Envs(3).fragments(5)
    start_feeder(broker.endpoints.worker, batches)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORKS, broker.endpoints.learner]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    refusal, steps = ended.stdout.splitlines()
    assert "one reader, this process" in refusal
    assert "num_workers=0" in refusal
    assert int(steps) == sum(batch.steps for batch in batches)


def test_a_dataset_cannot_be_sent_to_another_process(open_stream: OpenStream) -> None:
    with pytest.raises(ConfigError, match="one reader"):
        ForkingPickler.dumps(EpisodeDataset(open_stream()))


def test_a_learner_that_dies_between_checkpoint_and_commit_trains_on_each_step_once(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    batches = Envs(4, fails=0.0).fragments(12)
    start_feeder(broker.endpoints.worker, batches)
    state, seen = LearnerState(tmp_path), 0
    first = open_stream(auto_commit=False)
    for number, steps in enumerate(loader(first)):
        seen += len(steps)
        state.save(first, {"w": torch.ones(1)}, steps=seen)
        if number == 6:
            break  # the last one is saved, and not committed
        first.commit()
    first.close()
    saved = state.load()
    assert saved is not None
    assert saved.steps == seen
    second = open_stream(position=saved.position)
    seen += sum(len(steps) for steps in loader(second))
    assert seen == sum(batch.steps for batch in batches)


@pytest.mark.thorough
def test_a_dataset_of_an_ended_fleet_is_empty_and_says_why(
    broker: BrokerThread, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    stream = stack.enter_context(
        EpisodeStream(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S, silence_timeout_s=0.3)
    )
    broker.stop()
    assert list(loader(stream)) == []
    caplog.clear()
    assert list(loader(stream)) == []
    assert "the dataset has no more items: " in caplog.text


# -- loaders whose worker processes are ranks --------------------------------------------------------------------------

SHIPPED = 40
HOLD = 21
"""The item that the user has when it stops: all before are trained on."""
AGAIN = 5
"""The most items of each worker process that come again to the next loop although the user had them."""


class Loader(Process):
    """A learner with a loader in a process of its own; `lines` are what it wrote."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "support.pipeline.loader_process"]
        words = [str(run_dir), str(run_dir / "loader"), orjson.dumps({"hold": HOLD, **options}).decode()]
        popen = subprocess.Popen([*command, *words], cwd=Path(__file__).parents[1])
        super().__init__(popen, run_dir / "loader")

    def lines(self) -> list[dict[str, Any]]:
        text = self.log.read_bytes() if self.log.exists() else b""
        return [orjson.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def items(self, loop: int) -> list[bytes]:
        return [orjson.dumps(line["item"]) for line in self.lines() if line.get("loop") == loop]

    def word(self, key: str) -> Any:
        """Its word on `key`, once it has said it."""

        def said() -> list[Any]:
            assert self.popen.poll() is None or any(key in line for line in self.lines())
            return [line[key] for line in self.lines() if key in line]

        return wait_until(said, f"the loader's word on {key}")[-1]

    def go_on(self) -> None:
        Path(f"{self.log}.go").touch()
        assert self.wait() == 0


@pytest.mark.parametrize(("context", "workers"), [("fork", 1), ("fork", 2), ("spawn", 2)])
def test_a_loader_settles_no_batch_before_its_user_has_asked_for_a_later_one(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, tmp_path: Path, context: str, workers: int
) -> None:
    batches = Envs(5).fragments(SHIPPED)
    start_feeder(broker.endpoints.worker, batches, window=SHIPPED)
    loader = stack.enter_context(Loader(tmp_path, num_workers=workers, multiprocessing_context=context))
    loader.word("held")
    loader.signal(signal.SIGKILL)
    loader.wait()
    items = loader.items(0)
    assert len(set(items)) == len(items) == HOLD
    options = {"connect_timeout_s": TIMEOUT_S, "batch_timeout_s": 2.0}
    with EpisodeStream(broker.endpoints.learner, **options) as stream:
        rest = {orjson.dumps(told(batch)) for batch in stream}
    shipped = {orjson.dumps(told(batch)) for batch in batches}
    assert rest < shipped
    assert shipped - rest <= set(items[:-1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("killed", [0, 1])
def test_the_next_loader_gets_what_a_killed_worker_process_had(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, tmp_path: Path, killed: int
) -> None:
    batches = Envs(6).fragments(SHIPPED)
    start_feeder(broker.endpoints.worker, batches, window=SHIPPED)
    loader = stack.enter_context(Loader(tmp_path, num_workers=2, multiprocessing_context="spawn"))
    os.kill(sorted(loader.word("held"))[killed], signal.SIGKILL)
    # Torch raises in the middle of whatever the main thread does: here while it waits, and not within a publish.
    assert re.search("killed by signal|exited unexpectedly", loader.word("error")), "torch says one or the other"
    loader.go_on()
    assert loader.word("published") == len(loader.items(0) + loader.items(1)), "the publisher is never fenced"
    shipped = {orjson.dumps(told(batch)) for batch in batches}
    first, second = loader.items(0), loader.items(1)
    assert len(set(second)) == len(second)
    assert set(first) | set(second) == shipped
    assert set(second) < shipped, "what was settled does not come again"


def test_the_next_loop_of_persistent_workers_gets_what_the_last_one_left(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    batches = Envs(8).fragments(SHIPPED)
    start_feeder(broker.endpoints.worker, batches, window=SHIPPED)
    loader = stack.enter_context(Loader(tmp_path, num_workers=2, persistent_workers=True))
    held = loader.word("held")
    loader.go_on()
    first, second = loader.items(0), loader.items(1)
    assert len(set(first)) == len(first) == HOLD
    assert len(set(second)) == len(second)
    assert set(first) | set(second) == {orjson.dumps(told(batch)) for batch in batches}
    assert len(first) + len(second) - SHIPPED <= AGAIN * len(held)


def test_a_loader_without_worker_processes_reads_as_a_plain_stream(
    broker: BrokerThread, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    batches = Envs(7).fragments(6)
    feeder = start_feeder(broker.endpoints.worker, batches)
    dataset = StreamDataset(tmp_path, convert=told, batch_timeout_s=1.0)
    with WeightPublisher.of(tmp_path) as weights:
        assert list(DataLoader(dataset, batch_size=None)) == [told(batch) for batch in batches]
        wait_until(feeder.all_settled, "the settlement of all batches")
        assert list(DataLoader(dataset, batch_size=None)) == []
        weights.publish({"w": torch.ones(1)})


def test_a_dataset_of_a_fleet_commits_by_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a StreamDataset commits by itself"):
        StreamDataset(tmp_path, auto_commit=False)
    place = {"fleet_id": "test", "slot": 0, "incarnation": 1, "settled": {"seq": 3}}
    with pytest.raises(ConfigError, match="position: each loop goes on after what was committed; give EpisodeDataset"):
        StreamDataset(tmp_path, position=[place])
