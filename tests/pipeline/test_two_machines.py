"""A fleet over two network namespaces with keys, each machine having only the files that `keys init` says it needs."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.errors import ExitCode
from support.fleets.two_machines import NoNamespacesError, TwoMachines
from support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.netns, pytest.mark.slow]

FLEET = ("--fleet-id", "two")

LEARNER = """
import sys, numpy as np
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.workers.modules import actor_critic
with EpisodeStream(sys.argv[1], keys=sys.argv[2]) as stream, WeightPublisher(sys.argv[1], keys=sys.argv[2]) as weights:
    module, steps = actor_critic(stream.spaces()), 0
    weights.publish(module.state_dict())
    for batch in stream:
        steps += batch.steps
        seq = weights.publish(module.state_dict())
        print(steps, int(batch.columns["weights_seq"].max()), flush=True)
        if steps >= 4096 and int(batch.columns["weights_seq"].max()) > 1:
            break
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    with ExitStack() as stack:
        try:
            two = stack.enter_context(TwoMachines())
        except NoNamespacesError as error:
            pytest.skip(str(error))
        yield two


def headrace(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.deploy", *arguments]


def a_part_of(keys: Path, folder: Path, *names: str) -> str:
    """A folder with copies of these files, as scp -p would make them."""
    folder.mkdir(mode=0o700)
    for name in names:
        shutil.copy2(keys / name, folder)
    return f"keys.dir={folder}"


def start(stack: ExitStack, command: list[str], log: Path) -> subprocess.Popen[str]:
    """A process that is gone at the end of the test, whatever happens."""
    with log.open("w") as stderr:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True))
    stack.callback(lambda: process.poll() is None and process.kill())
    return process


def test_a_worker_on_another_machine_delivers_with_keys_and_a_stranger_does_not(
    machines: TwoMachines, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    make_keys(tmp_path / "strangers")
    shutil.copy(keys / "broker.public", tmp_path / "strangers")
    worker_keys = a_part_of(keys, tmp_path / "theirs", "worker.secret", "broker.public")
    run_dir, address = tmp_path / "run", f"broker.host={machines.HERE}"
    with ExitStack() as stack:
        serve = headrace("broker", *FLEET, "--run-dir", str(run_dir), "--set", address, "--set", f"keys.dir={keys}")
        broker = start(stack, machines.command(machines.here, *serve), tmp_path / "broker.log")
        wait_until((run_dir / "broker.json").exists, "the broker's start")
        endpoints = orjson.loads((run_dir / "broker.json").read_bytes())["endpoints"]
        assert machines.HERE in endpoints["worker"]
        join = headrace("worker", *FLEET, "--endpoint", endpoints["worker"], "--num-envs", "4")
        worker_dir, stranger_dir = str(tmp_path / "w"), str(tmp_path / "s")
        sample = [*join, "--run-dir", worker_dir, "--set", worker_keys]
        worker = start(stack, machines.command(machines.there, *sample), tmp_path / "worker.log")
        intrude = [*join, "--run-dir", stranger_dir, "--set", f"keys.dir={tmp_path / 'strangers'}"]
        stranger = start(stack, machines.command(machines.there, *intrude), tmp_path / "stranger.log")
        train = [sys.executable, "-c", LEARNER, endpoints["learner"], str(keys)]
        learner = start(stack, machines.command(machines.here, *train), tmp_path / "learner.log")
        lines = learner.communicate(timeout=TIMEOUT_S)[0].splitlines()
        assert learner.returncode == 0, (tmp_path / "learner.log").read_text()
        steps, weights_seq = map(int, lines[-1].split())
        assert steps >= 4096, "chunks came over the cable"
        assert weights_seq > 1, "and weights went back"
        assert stranger.wait(150) == ExitCode.KEYS
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(150) == 0, (tmp_path / "worker.log").read_text()
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(150) == 0
    refusal = (tmp_path / "broker.log").read_text()
    assert f"an unknown key ({public_start(tmp_path / 'strangers')}... from {machines.THERE})" in refusal
    assert refusal.count("refused") == 1


def public_start(folder: Path) -> str:
    """The first characters of a worker's public key, by which logs name it."""
    line = next(line for line in (folder / "worker.public").read_text().splitlines() if line.startswith("public"))
    return line.partition('"')[2][:8]


def test_without_keys_another_machine_is_not_served(machines: TwoMachines, tmp_path: Path) -> None:
    serve = headrace("broker", *FLEET, "--run-dir", str(tmp_path / "run"), "--set", f"broker.host={machines.HERE}")
    command = machines.command(machines.here, *serve)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert ended.returncode == ExitCode.CONFIG
    assert "serves by TCP: it needs keys.dir" in " ".join(ended.stderr.split())
