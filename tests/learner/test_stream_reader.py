"""A program that only reads a stream: it needs five packages, and runs where no other package is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.fleets.running_fleet import RunningFleet

ONLY_FIVE = """
import sys
from importlib.metadata import packages_distributions

OURS = {"headrace", "numpy", "orjson", "pydantic", "xxhash", "zmq"}
OF_PYDANTIC = {"annotated_types", "pydantic_core", "typing_extensions", "typing_inspection"}
OTHERS = packages_distributions().keys() - OURS - OF_PYDANTIC
assert {"torch", "redis", "gymnasium", "lz4"} < OTHERS

class NothingElse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NothingElse())
"""
READER = """
from headrace.learner_stub import ConnectorMerger, EpisodeStream, Returns, episodes_of, gae, vtrace

with EpisodeStream.of(sys.argv[1], batch_timeout_s=60.0) as stream:
    print(stream.spaces().action.n, next(iter(stream)).steps > 0)
"""


def test_a_stream_reader_imports_five_packages() -> None:
    names = READER.partition("\n\nwith")[0]
    subprocess.run([sys.executable, "-c", ONLY_FIVE + names], check=True)
    asked = [sys.executable, "-c", f"{ONLY_FIVE}\nfrom headrace.learner_stub import WeightPublisher"]
    refused = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert "No module named 'torch'" in refused.stderr, "weights are torch's: a publisher needs it"


@pytest.mark.slow
def test_a_stream_is_read_without_any_other_package(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(ONLY_FIVE + READER)
    own = ("--set", "learner.enabled=false", "--set", "worker.random_actions_before_weights=true")
    with RunningFleet(tmp_path / "run", "--env", "CartPole-v1", "--workers", "1", *own):
        command = [sys.executable, str(tmp_path / "reader.py"), str(tmp_path / "run")]
        read = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert read.returncode == 0, read.stderr
    assert read.stdout == "2 True\n"
