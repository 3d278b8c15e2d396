"""A broker without a host serves its own user alone, by Unix sockets at endpoints that stay the same."""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from headrace.broker.files.state_file import Endpoints, read_broker_file
from headrace.broker.ports.sockets import BrokerSockets
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.errors import ConfigError, PortInUseError, RunDirError, UnreachableError
from headrace.schemas.settings.config import BrokerSection
from support.pipeline.delivery import BrokerThread, Envs, StartBroker, StartFeeder, batches_of, broker_process
from support.waiting import TIMEOUT_S, wait_until

NOBODY = 65_534


def folder_of(endpoints: Endpoints) -> Path:
    return Path(endpoints.worker.removeprefix("ipc://")).parent


def endpoints_of(run_dir: Path) -> Endpoints:
    file = read_broker_file(run_dir)
    assert file is not None
    return file.endpoints


def all_arrives(endpoints: Endpoints, run_dir: Path, start_feeder: StartFeeder, slot: int = 0) -> None:
    """A worker and a learner of the run directory get through, with weights, from the first batch to the last."""
    feeder = start_feeder(endpoints.worker, Envs(slot).fragments(5), slot=slot)
    with (
        EpisodeStream.of(run_dir, connect_timeout_s=TIMEOUT_S) as stream,
        WeightPublisher.of(run_dir, connect_timeout_s=TIMEOUT_S) as weights,
    ):
        weights.publish({"w": np.zeros(3, np.float32)})
        steps = sum(batch.steps for batch in batches_of(stream, feeder.all_settled))
        wait_until(lambda: feeder.weights.newest > (0, 0), "the weights")
    assert steps == sum(feeder.steps.values()) > 0
    assert feeder.error is None


def test_peers_survive_the_kill_of_a_broker_and_no_second_broker_takes_its_sockets(
    stack: ExitStack, start_broker: StartBroker, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    with broker_process(tmp_path) as killed:
        endpoints = endpoints_of(tmp_path)
        assert endpoints.worker == f"ipc://{tmp_path}/ipc/worker"
        assert stat.S_IMODE(folder_of(endpoints).stat().st_mode) == 0o700
        feeder = start_feeder(endpoints.worker, Envs().fragments(40), window=4)
        stream = stack.enter_context(EpisodeStream.of(tmp_path, connect_timeout_s=TIMEOUT_S))
        wait_until(lambda: stream.next(0.01) is not None, "the first batch")
        killed.signal(signal.SIGKILL)
        killed.wait()
    assert (folder_of(endpoints) / "worker").is_socket(), "a dead broker's socket stays"
    assert start_broker().endpoints == endpoints
    for _ in batches_of(stream, feeder.all_settled):
        pass
    assert feeder.error is None
    stream.close()
    with pytest.raises(PortInUseError, match=r"is already in use; .* choose another run directory"):
        BrokerThread(tmp_path)
    all_arrives(endpoints, tmp_path, start_feeder, slot=1)


def test_a_long_run_directory_has_its_sockets_in_a_private_folder_of_tmp(
    stack: ExitStack, start_broker: StartBroker, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    run_dir = tmp_path / ("a-long-name-" * 10)
    run_dir.mkdir()
    first = start_broker(run_dir)
    folder = folder_of(first.endpoints)
    stack.callback(shutil.rmtree, folder)
    assert folder.parent == Path("/tmp")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    first.stop()
    second = start_broker(run_dir)
    assert second.endpoints == first.endpoints
    all_arrives(second.endpoints, run_dir, start_feeder)
    second.stop()
    folder.chmod(0o755)
    third = start_broker(run_dir)
    stack.callback(shutil.rmtree, folder_of(third.endpoints))
    assert folder_of(third.endpoints) != folder
    third.stop()
    assert start_broker(run_dir, allow_insecure=True).endpoints.worker.startswith("tcp://"), "the next run may use TCP"


def test_a_run_directory_may_have_a_space_in_its_path(
    start_broker: StartBroker, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run of 27 Nov"
    run_dir.mkdir()
    broker = start_broker(run_dir)
    assert broker.endpoints.worker == f"ipc://{run_dir}/ipc/worker"
    all_arrives(broker.endpoints, run_dir, start_feeder)


# -- all others -------------------------------------------------------------------------------------------------------


def open_it(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


def link_it(folder: Path) -> None:
    folder.with_name("elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.with_name("elsewhere"))


def give_it_away(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (open_it, r"others may use it \(mode 0755\); chmod 700"),
        (link_it, "it is a symbolic link"),
        (give_it_away, f"it belongs to user {NOBODY}"),
    ],
)
def test_broker_and_learner_refuse_an_unsafe_socket_folder(
    tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(tmp_path / "ipc")
    with pytest.raises(RunDirError, match=words):
        EpisodeStream(f"ipc://{tmp_path}/ipc/learner", connect_timeout_s=1.0)
    if spoil is not open_it:
        with pytest.raises(RunDirError, match=words):
            BrokerThread(tmp_path)


def test_a_broker_closes_its_folder_in_a_copy_of_a_run_directory_with_open_modes(
    start_broker: StartBroker, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    open_it(tmp_path / "ipc")
    broker = start_broker(tmp_path)
    assert stat.S_IMODE((tmp_path / "ipc").stat().st_mode) == 0o700
    all_arrives(broker.endpoints, tmp_path, start_feeder)


@pytest.mark.parametrize("address", ["ipc://here", "ipc://@abstract", "ipc:///", f"ipc:///{'x' * 107}"])
def test_an_ipc_address_without_a_usable_path_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"the address should be ipc:///PATH"):
        EpisodeStream(address)


def test_a_learner_waits_for_a_missing_folder_only_where_others_cannot_make_it(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="there is none, and others may make it in /tmp; check the address"):
        EpisodeStream("ipc:///tmp/headrace-that-is-not/learner", connect_timeout_s=1.0)
    with pytest.raises(UnreachableError, match=r"no broker answers at .* check that it runs on this machine"):
        EpisodeStream(f"ipc://{tmp_path}/ipc/learner", connect_timeout_s=0.2, run_dir=tmp_path)


def test_a_broker_ends_although_one_of_its_sockets_was_removed(tmp_path: Path) -> None:
    sockets = BrokerSockets(BrokerSection(), tmp_path, None, None)
    folder = folder_of(sockets.endpoints)
    (folder / "worker").unlink()
    sockets.close()
    assert not {"worker", "learner", "weights"} & {file.name for file in folder.iterdir()}
    BrokerSockets(BrokerSection(), tmp_path, None, None).close()
