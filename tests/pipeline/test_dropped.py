"""Streams, publishers and clients that are dropped without close(): nothing hangs, and nothing of the fleet is held."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.errors import HeadraceError
from support.pipeline.delivery import BrokerThread, Envs, StartFeeder
from support.serving.served import LIMITS, Served
from support.waiting import TIMEOUT_S, wait_until

_BEGIN = """
import gc, os, sys, threading
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.errors import HeadraceError
from headrace.workers.serving.client import PolicyClient

class Cycle:
    def __init__(self, held):
        self.held, self.itself = held, self

where, collect = sys.argv[1], lambda: gc.collect() and None
"""


def run_program(code: str, where: str) -> str:
    """Run a program in a process of its own, which other threads, forks and the end of Python cannot disturb."""
    command = [sys.executable, "-W", "default::ResourceWarning", "-c", _BEGIN + code, where]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert "dropped without close()" in ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    "drop",
    [
        "stream = EpisodeStream(where)",  # a cell that runs again
        "Cycle(stream); del stream; collect()",
        "held = [stream]; del stream; t = threading.Thread(target=held.clear); t.start(); t.join()",
    ],
    ids=["again", "in a cycle", "in another thread"],
)
def test_what_a_dropped_stream_committed_stays_and_all_else_comes_again(
    drop: str, broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    batches = Envs(3).fragments(4)
    feeder = start_feeder(broker.endpoints.worker, batches)
    code = f"""
stream = EpisodeStream(where, auto_commit=False)
publisher = WeightPublisher(where)
first = stream.next({TIMEOUT_S}); stream.commit()
lost = stream.next({TIMEOUT_S})
Cycle(publisher); del publisher; {drop}; collect()
stream = EpisodeStream(where)
print(stream.epoch)
got = [stream.next({TIMEOUT_S}).arrays["obs"].tobytes() for _ in range({len(batches) - 1})]
print(got[0] == lost.arrays["obs"].tobytes())
stream.commit()
stream.next(0.0)
"""
    epoch, same = run_program(code, broker.endpoints.learner).split()
    assert int(epoch) >= 2, "the newest stream has the lease"
    assert same == "True"
    wait_until(feeder.all_settled, "the settlement of all batches")


_USES = (
    f"stream.next({TIMEOUT_S})",
    "next(iter(stream))",
    "stream.commit()",
    "stream.pump()",
    'publisher.publish({"w": np.zeros(1)})',
    'publisher.log({"loss": 1.0})',
    "publisher.pump()",
    "publisher.tasks.publish(None)",
)


def test_a_copy_by_fork_of_an_open_stream_is_refused_and_ends_by_itself_and_disturbs_nothing(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    batches = Envs(3).fragments(3)
    start_feeder(broker.endpoints.worker, batches)
    code = f"""
import numpy as np
EpisodeStream(where)  # dropped at once
with EpisodeStream(where) as stream, WeightPublisher(where) as publisher:
    publisher.tasks.publish(None)
    stream.next({TIMEOUT_S})
    while stream.pending < {len(batches) - 1}:  # the copy has these too
        stream.pump(0.1)
    if not (copy := os.fork()):
        for use in {_USES}:
            try:
                eval(use)
                print("used:", use, flush=True)
            except HeadraceError as error:
                print(error, flush=True)
    else:
        print(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
        print([stream.next({TIMEOUT_S}) is not None for _ in range({len(batches) - 1})])
        print(publisher.publish({{"w": np.zeros(1)}}))
"""
    *refusals, code_of_copy, received, seq = run_program(code, broker.endpoints.learner).splitlines()
    assert len(refusals) == len(_USES)
    for refusal in refusals:
        assert re.search(r" process \d+, .*is a copy of .* by fork.*; open ", refusal)
    assert code_of_copy == "0"
    assert received == str([True] * (len(batches) - 1))
    assert seq == "1"


def test_a_stream_and_a_publisher_cannot_be_pickled(broker: BrokerThread) -> None:
    with EpisodeStream(broker.endpoints.learner) as stream, WeightPublisher(broker.endpoints.learner) as publisher:
        for member in (stream, publisher, publisher.tasks):
            with pytest.raises(HeadraceError, match=f"this {type(member).__name__} cannot be copied.*StreamDataset"):
                copy.copy(member)


def test_a_dropped_policy_client_ends_with_its_thread() -> None:
    with Served(replace(LIMITS, lease_s=3600.0)) as server:
        code = f"""
client = PolicyClient(where)
client.start_episode()
(thread,) = set(threading.enumerate()) - {{threading.main_thread()}}
Cycle(client); del client; collect()
thread.join({TIMEOUT_S})
print(thread.is_alive())
with PolicyClient(where) as client:
    print(client.start_episode() != "")
"""
        assert run_program(code, server.endpoint) == "False\nTrue\n"


def test_every_zeromq_context_has_an_owner(root: Path) -> None:
    for folder in ("broker", "deploy", "learner_stub", "workers"):
        for path in (root / folder).rglob("*.py"):
            made = re.findall(r".*zmq\.Context\(.*", path.read_text())
            assert all("OwnSockets(zmq.Context()" in line for line in made), path
