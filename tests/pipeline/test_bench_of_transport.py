"""The bench of transport stands in for a worker's sampler, and is typed by nobody: it has to follow the worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TAKE_THREE = """
from processes import Processes
from transport import LOADS, Headrace
with Processes() as processes, Headrace(LOADS[1], processes) as arm:
    print([arm.take() for _ in range(3)])
"""


def test_prebuilt_batches_go_through_a_worker_and_a_broker_to_a_stream() -> None:
    bench = Path(__file__).parents[1] / "bench"
    done = subprocess.run(
        [sys.executable, "-c", TAKE_THREE], cwd=bench, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("[16, 16, 16]", 0), done.stderr
