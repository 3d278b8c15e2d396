"""The schedule of `headrace chaos` follows from its arguments alone, and a plan in a file is that schedule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.deploy.annexes.chaos.schedule import Event, Kind, Plan, make_plan, read_plan
from headrace.schemas.errors import ConfigError, ExitCode
from support.waiting import TIMEOUT_S


def print_plan(*arguments: str) -> str:
    command = [sys.executable, "-m", "headrace.deploy", "chaos", "--print-plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout


def test_the_same_seed_gives_the_same_schedule_in_another_process() -> None:
    arguments = ("--minutes", "10", "--workers", "3")
    printed = print_plan(*arguments, "--seed", "7")
    assert Plan.model_validate_json(printed) == make_plan(7, 10, 3, 3.0)
    assert Plan.model_validate_json(print_plan(*arguments, "--seed", "8")).events != make_plan(7, 10, 3, 3.0).events


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_happens_within_ten_minutes_and_in_order(seed: int) -> None:
    plan = make_plan(seed, 10, 2, 3.0)
    assert {event.kind for event in plan.events} == set(Kind)
    assert max(len(event.targets) for event in plan.events) == 3
    assert {event.detail for event in plan.events} > {""}
    times = [event.at_s for event in plan.events]
    assert times == sorted(times)
    assert times[-1] < plan.seconds


def test_a_plan_is_read_from_a_file_as_it_was_written(tmp_path: Path) -> None:
    plan = make_plan(1, 2, 2, 3.0)
    (tmp_path / "plan.json").write_bytes(plan.as_json())
    assert read_plan(tmp_path / "plan.json") == plan
    (tmp_path / "plan.toml").write_text(
        "seed = 1\nminutes = 1.0\nworkers = 1\nlease_s = 3.0\n"
        '[[events]]\nat_s = 9.0\nkind = "flush"\n[[events]]\nat_s = 3.0\nkind = "kill"\ntargets = ["broker", "redis"]\n'
    )
    kill, flush = read_plan(tmp_path / "plan.toml").events
    assert kill == Event(at_s=3.0, kind=Kind.KILL, targets=("broker", "redis"))
    assert flush.kind is Kind.FLUSH


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ('{"at_s": 1, "kind": "explode"}', "events.0.kind"),
        ('{"at_s": 1, "kind": "kill", "targets": ["moon"]}', "moon"),
        ('{"at_s": 1, "kind": "kill"}', "kill has 0 targets"),
        ('{"at_s": 1, "kind": "env", "detail": "sulk"}', "sulk"),
        ('{"at_s": -1, "kind": "flush"}', "events.0.at_s"),
        ("nonsense", "neither JSON nor TOML"),
    ],
)
def test_a_bad_plan_is_refused_with_the_place_of_its_fault(tmp_path: Path, event: str, said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(f'{{"seed": 1, "minutes": 1, "workers": 2, "lease_s": 3, "events": [{event}]}}')
    with pytest.raises(ConfigError) as caught:
        read_plan(path)
    assert said in str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIG
