"""A learner of one's own that knows a run directory: it waits for the fleet, finds it again, and ends with it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from headrace.learner_stub import fleet_place
from headrace.learner_stub.fleet_place import FleetPlace, await_endpoint, keys_folder
from headrace.schemas.errors import UnreachableError
from support.fleets.running_fleet import RunningFleet

LEARNER = """
import logging, sys
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.workers.modules import actor_critic

logging.basicConfig(level="INFO", stream=sys.stderr)
with EpisodeStream.of(sys.argv[1], connect_timeout_s=150.0) as stream, WeightPublisher.of(sys.argv[1]) as weights:
    module = actor_critic(stream.spaces())
    weights.publish(module.state_dict())
    for batch in stream:
        print(stream.endpoint, batch.incarnation, flush=True)
        weights.publish(module.state_dict())
print("the loop has ended", flush=True)
"""


@pytest.mark.slow
def test_it_waits_for_the_fleet_finds_it_on_other_ports_and_ends_with_it(tmp_path: Path) -> None:
    run_dir, heard = tmp_path / "run", tmp_path / "heard"
    settings = ("--env", "CartPole-v1", "--workers", "1", "--num-envs", "2", "--set", "learner.enabled=false")
    with ExitStack() as stack:
        words = stack.enter_context((tmp_path / "words").open("wb"))
        lines = stack.enter_context(heard.open("wb"))
        learner = subprocess.Popen([sys.executable, "-c", LEARNER, str(run_dir)], stdout=lines, stderr=words)
        stack.callback(learner.kill)
        seen: list[str] = []
        for _ in range(2):
            with RunningFleet(run_dir, *settings) as fleet:
                fleet.wait_until(lambda: fleet.pid("worker"), "a worker")

                def has_batches() -> bool:
                    assert learner.poll() is None, (tmp_path / "words").read_text()
                    at = f"{fleet.endpoint('learner')} "
                    return any(line.startswith(at) for line in heard.read_text().splitlines())

                fleet.wait_until(has_batches, "batches at the learner")
                seen.append(fleet.endpoint("learner"))
        assert len(set(seen)) == 2, "ports changed"
        assert learner.wait(100) == 0, (tmp_path / "words").read_text()
    assert heard.read_text().splitlines()[-1] == "the loop has ended"
    said = (tmp_path / "words").read_text()
    assert f"the broker has moved from {seen[0]} to {seen[1]}" in said
    assert f"the stream ends: the fleet in {run_dir} was stopped" in said


def _write(run_dir: Path, name: str, content: object) -> None:
    (run_dir / name).write_bytes(orjson.dumps(content))


def _broker(run_dir: Path, endpoint: str) -> None:
    _write(run_dir, "broker.json", {"endpoints": {"learner": endpoint}})


def test_a_fleet_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match=r"broker\.json"):
        await_endpoint(tmp_path, 0.2)
    _broker(tmp_path, "tcp://127.0.0.1:0")
    with pytest.raises(UnreachableError):
        await_endpoint(tmp_path, 0.2)
    _broker(tmp_path, "tcp://127.0.0.1:9")
    assert await_endpoint(str(tmp_path), 0.2) == "tcp://127.0.0.1:9"


def test_a_broker_that_is_silent_for_long_ends_the_stream_until_it_is_back(tmp_path: Path) -> None:
    place = FleetPlace("tcp://a:1", None, patience_s=60.0)
    assert place.observe(False, 0.0) is None
    place.observe(False, 500.0)
    assert not place.ended, "it was never there: connecting has a deadline of its own"
    place.observe(True, 501.0)
    for second in range(502, 562):
        place.observe(False, float(second))
    assert not place.ended
    place.observe(False, 562.0)
    assert "no word from the broker at tcp://a:1, 60 s ago" in place.ended
    place.observe(True, 563.0)
    assert not place.ended


def test_a_fleet_that_was_stopped_ends_it_sooner_and_one_that_moved_is_followed(tmp_path: Path) -> None:
    _broker(tmp_path, "tcp://a:1")
    _write(tmp_path, "fleet.json", {"state": "stopped"})
    place = FleetPlace("tcp://a:1", tmp_path, patience_s=60.0)
    place.observe(True, 0.0)
    place.observe(False, 1.0)
    place.observe(False, 1.0 + fleet_place.STOPPED_WAIT_S)
    assert "was stopped" in place.ended
    _broker(tmp_path, "tcp://a:2")
    assert place.observe(False, 12.0) == "tcp://a:2"
    assert place.endpoint == "tcp://a:2"


def test_keys_are_those_of_the_fleets_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_folder(tmp_path) is None
    _write(tmp_path, "config.json", {"keys": {"dir": "/keys"}})
    assert keys_folder(tmp_path) == "/keys"
    monkeypatch.setenv("HEADRACE_KEYS__DIR", "/others")
    assert keys_folder(tmp_path) is None
    (tmp_path / "config.json").write_text("no json")
    assert keys_folder(tmp_path) is None
