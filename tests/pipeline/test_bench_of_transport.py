"""The transport bench replaces a worker's sampler. mypy does not check it, so this test runs it with the worker."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.processes

TAKE_THREE = """
from bench.processes import Processes
from bench.transport import LOADS, Headrace
with Processes() as processes, Headrace(LOADS[1], processes) as arm:
    print([arm.take() for _ in range(3)])
"""


@pytest.mark.thorough
def test_prebuilt_batches_go_through_a_worker_and_a_broker_to_a_stream() -> None:
    command = [sys.executable, "-c", TAKE_THREE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[16, 16, 16]", 0), done.stderr
