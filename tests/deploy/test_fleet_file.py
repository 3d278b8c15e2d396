"""The content of fleet.json while a stopped run starts again."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.deploy.report.audit import find_books
from headrace.deploy.run.fleet_file import FleetFile, continue_fleet, read_fleet_file, told_as_starting
from headrace.deploy.run.run_dir import RunDir
from headrace.schemas.errors import ConfigError

ENDPOINTS = {"worker": "tcp://127.0.0.1:5701"}


@pytest.mark.parametrize("state", ["stopped", "running"])
def test_a_stopped_run_is_shown_as_starting_until_the_check_fails(tmp_path: Path, state: str) -> None:
    with RunDir(tmp_path / "run") as run_dir:
        before = FleetFile(fleet_id="f", state=state, endpoints=ENDPOINTS, env_steps=7, incarnations={"worker-0": 3})
        before.write(run_dir.fleet_json)
        seen: list[FleetFile] = []

        def check() -> None:
            with told_as_starting(run_dir):
                seen.append(read_fleet_file(run_dir.fleet_json))
                raise ConfigError("as a check that fails")

        with pytest.raises(ConfigError):
            check()
        assert read_fleet_file(run_dir.fleet_json) == before
    told = ("starting", {}) if state == "stopped" else ("running", ENDPOINTS)
    assert (seen[0].state, seen[0].endpoints) == told
    assert (seen[0].env_steps, seen[0].incarnations) == (7, {"worker-0": 3})


def test_a_new_run_gets_no_fleet_file_from_its_check(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run") as run_dir:
        with told_as_starting(run_dir):
            pass
        assert not run_dir.fleet_json.exists()


def test_a_start_that_is_refused_before_it_has_redis_keeps_the_books_of_the_run(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run") as run_dir:
        before = FleetFile(fleet_id="f", state="stopped", redis_url="redis://127.0.0.1:1/0", env_steps=7)
        before.write(run_dir.fleet_json)
        continue_fleet(run_dir, "").write(run_dir.fleet_json)
        assert find_books(run_dir.path) == (before.redis_url, "f")
