"""`headrace top` as people see it: on a real pseudo-terminal, on a pipe, and with fleets of any size."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.text import Text
from typer.testing import CliRunner

from headrace.deploy.annexes.watch.commands import app
from headrace.deploy.annexes.watch.state.fleet_state import fleet_state
from headrace.deploy.annexes.watch.state.shown_figures import PAGE_CHARTS, as_text
from headrace.deploy.annexes.watch.top.top import head, plain, screen, sparkline
from headrace.deploy.annexes.watch.top.top import top as show
from headrace.deploy.monitoring.facts import Facts, FactsReader
from headrace.deploy.monitoring.findings import Finding
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.consumer_groups import GroupBooks, GroupRow
from headrace.schemas.accounts.ledger import FleetLedger
from headrace.schemas.basics.bounds import OTHER_TASKS
from headrace.schemas.errors import ConfigError
from support.terminal_screen import OnTerminal
from support.waiting import wait_until

CURVES = {"env_steps_per_s": [1.0, None, 3.0]}


def top(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.deploy", "top", *arguments]


def document(workers: dict[int, dict[str, Any]], *findings: Finding, **facts: Any) -> dict[str, Any]:
    return fleet_state(Facts(1000.0, Snapshot(fleet_id="demo", workers=workers), **facts), list(findings))


def crowd(count: int) -> dict[str, Any]:
    return document(
        {
            slot: {"incarnation": 1, "host": f"host-{slot % 7}", "weights_behind": slot % 5, "blocked": ""}
            for slot in range(count)
        }
    )


def text_of(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize("size", [(80, 24), (40, 6), (10, 3), (1, 1), (200, 60)])
@pytest.mark.parametrize("count", [0, 64, 1000])
def test_a_screen_keeps_its_size_for_fleets_of_any_size(size: tuple[int, int], count: int) -> None:
    width, height = size
    finding = Finding("x", "error", "worker-1", "w" * 500, 900.0, "broker.lease_s = 3", "headrace " + "y" * 500)
    shown = {**crowd(count), "findings": [{**finding_facts(finding)} for _ in range(9)]}
    lines = screen(shown, CURVES, width, height)
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width


def test_a_long_verdict_is_shown_whole_on_a_narrow_screen() -> None:
    lost = "196 steps lost by killed workers, 2,062 by envs that raised"
    verdict = f"Learning. Envs fail (env 0 of worker-2). {lost}."
    lines = [line.plain for line in screen({**crowd(2), "verdict": verdict}, CURVES, 80, 24)]
    assert " ".join(lines[1:3]) == verdict


def test_a_finding_shows_its_command_or_else_what_helps() -> None:
    for command, helps in (("kill -CONT 71", "kill -CONT 71"), ("", "Look at it.")):
        found = finding_facts(Finding("x", "error", "worker-1", "It waits", None, "", command, (), "Look at it."))
        lines = text_of(screen({**crowd(2), "findings": [found]}, CURVES, 80, 24)).splitlines()
        assert next(line.strip() for line in lines[lines.index("! It waits") + 1 :]) == helps


def finding_facts(finding: Finding) -> dict[str, Any]:
    found: dict[str, Any] = document({}, finding)["findings"][0]
    return found


def test_texts_of_peers_cannot_move_the_cursor_or_break_a_line() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07\r\nnew\tline\u202e漢字漢字漢字漢字漢字"
    fleet = document(
        {0: {"host": hostile, "env_failure": hostile, "blocked": hostile, hostile: hostile, "pid": hostile}},
        Finding("x", "error", hostile, hostile, None, hostile, hostile),
    )
    for lines in (screen(fleet, {}, 120, 40), plain(fleet, {}, 120)):
        assert all(character.isprintable() for line in lines for character in line.plain)
    assert max(line.cell_len for line in screen(fleet, {}, 33, 40)) <= 33


def test_workers_that_do_not_run_stand_first_and_the_rest_is_counted() -> None:
    fleet = crowd(1000)
    fleet["workers"][700]["state"] = "restarting"
    rows = [line.plain.split() for line in screen(fleet, {}, 80, 24)]
    header = next(number for number, row in enumerate(rows) if row[:2] == ["Worker", "State"])
    assert [row[0] for row in rows[header + 1 : header + 4]] == ["700", "0", "1"]
    assert rows[-2] == ["and", f"{1000 - (22 - header - 1):,}", "workers", "more"]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_screen_and_restores_the_terminal(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "fleet.json").write_bytes(orjson.dumps({"fleet_id": "gone", "redis_url": "redis://127.0.0.1:1/0"}))
    with OnTerminal(top("--run-dir", str(tmp_path))) as terminal:
        terminal.shows("no worker yet")
        assert terminal.screen.is_other
        terminal.process.send_signal(number)
        assert terminal.process.wait(60) == 0
        wait_until(lambda: not terminal.screen.is_other, "the first screen again")
        assert terminal.modes() == terminal.modes_before


def test_aborted_episodes_stand_beside_finished_ones() -> None:
    gauges = {"aborted_window": 100, "aborted_return_mean": 9.5, "aborted_len_mean": 7000.0}
    gauges |= {"episode_return_mean": 12.25, "episode_len_mean": 51.0}
    totals = {"aborted_episodes_total": 123_456, "env_steps_total": 9}
    facts = Facts(1000.0, Snapshot(fleet_id="demo", gauges=gauges, totals=totals))
    told = "123,456, return 9.5, of finished ones 12.25; length 7,000, of finished ones 51"
    assert f"Aborted episodes {told}" in text_of(head(fleet_state(facts, []), {}, 120))
    assert "of 130 aborted" not in text_of(head(fleet_state(facts, []), {}, 120))
    facts.snapshot.gauges.update({"episodes_window": 100.0, "episodes_window_aborted": 30.0})  # type: ignore[attr-defined]
    assert text_of(head(fleet_state(facts, []), {}, 200)).count("30 of 130 aborted, 23 %") == 2, "return and length"
    assert "finished" not in text_of(head(crowd(2), {}, 120)), "no aborted one, no mean"


def test_each_consumer_group_has_a_line() -> None:
    state = GroupRow(on_slow="wait", connected=True, program="/r\x1b.py", pid=7, host="box", lag_steps=5120)
    state = state.model_copy(
        update={"committed": (81920, 640), "dropped": {"overflow": (64, 2), "before_group": (9, 1)}}
    )
    groups = {"record": GroupBooks(state), "watch": GroupBooks()}
    lines = text_of(head(fleet_state(Facts(1000.0, Snapshot(groups=groups)), []), {}, 140)).splitlines()
    assert [line for line in lines if line.startswith("group ")] == [
        r"group        record (wait): /r\x1b.py, pid 7 on box; lag 5,120 steps, committed 81,920, lost 64",
        "group        watch (drop): no reader; lag 0 steps, committed 0, lost 0",
    ]
    assert "group" not in text_of(head(fleet_state(Facts(1000.0, Snapshot()), []), {}, 140))


def test_tasks_stand_in_the_head_the_newest_first() -> None:
    row = {"episodes": 12_345.0, "env_failures": 2.0, "return_mean": 0.9131, "len_mean": 12.5}
    tasks: dict[str, Any] = {f'{{"level":{level}}}': {**row, "last_unix_s": 900.0 + level} for level in range(12)}
    tasks["\x1b[2J"] = {"episodes": 0.0, "env_failures": 1.0, "last_unix_s": 999.0}
    tasks[OTHER_TASKS] = {"episodes": 1.0, "env_failures": 0.0, "last_unix_s": 1.0}
    shown = fleet_state(Facts(1000.0, Snapshot(fleet_id="demo", task_figures=tasks)), [])
    levels = [f'{{"level":{level}}}' for level in range(12)]
    assert [one["task"] for one in shown["tasks"]] == [r"\x1b[2J", *levels, OTHER_TASKS], "as people count"
    text = text_of(head(shown, {}, 120))
    lines = [line for line in text.splitlines() if line.startswith("task ")]
    assert lines == [
        r"task         \x1b[2J: episodes 0, env failures 1",
        'task         {"level":11}: return 0.913, length 12.5, episodes 12.3k, env failures 2',
        'task         {"level":10}: return 0.913, length 12.5, episodes 12.3k, env failures 2',
    ]
    assert "and 11 tasks more" in text
    assert sum(line.plain.startswith("task ") for line in plain(shown, {}, 120)) == 14


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        *((0.123, "1", "12 %"), (0.0512, "1", "5.1 %"), (None, "1", "-"), ("x\n", "1", r"x\n")),
        *((5.5 * 2**20, "bytes", "5.5 MiB"), (1023, "bytes", "1023 B"), (0, "bytes", "0 B")),
        *((2.5, "s", "2.5 s"), (75.0, "s", "1 min 15 s"), (2, "versions", "2"), (-1, "versions", "older epoch")),
        *(
            (41230.5, "env steps/s", "41,230"),
            (0.25, "env steps/s", "0.25"),
            (12.25, "return", "12.25"),
            (1_234_567, "episodes", "1,234,567"),
        ),
        ({"worker": 2, "broker": 0}, "", "worker 2"),
    ],
)
def test_a_figure_is_told_in_its_unit(value: object, unit: str, text: str) -> None:
    assert as_text(value, unit) == text


def test_the_ledger_adds_up_where_steps_are_not_for_the_learner() -> None:
    books = FleetLedger(stepped=100, committed=(60, 1), queued=8, discarded={"frozen": 30, "env_hang": 2})
    shown = fleet_state(Facts(1000.0, Snapshot(fleet_id="demo", fleet=books)), [])
    printed = text_of(screen(shown, {}, 160, 40))
    assert "100 = committed 60 (60.0 %) + queued 8 + lost 2 + not for the learner 30\n" in printed
    assert "undelivered  frozen 30, env_hang 2" in printed


def test_small_charts_show_the_newest_values() -> None:
    assert sparkline([9.0, 0.0, 1.0, 2.0, 7.0], 4) == "▁▂▃█"
    assert sparkline([1.0, None, 1.0], 9) == "▁ ▁"
    assert sparkline([None], 9) == sparkline([1.0], 0) == ""


@pytest.mark.processes
def test_top_without_a_terminal_prints_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.json").write_bytes(orjson.dumps({"fleet_id": "gone", "redis_url": "redis://127.0.0.1:1/0"}))
    with FactsReader(tmp_path) as reader:
        show(reader, once=False, as_json=False)
        printed = capsys.readouterr().out
        show(reader, once=False, as_json=True)
        told = orjson.loads(capsys.readouterr().out)
    assert "\x1b" not in printed
    assert "ledger       not known" in printed
    assert "no worker yet" in printed
    assert told["verdict"] in printed
    with OnTerminal(top("--run-dir", str(tmp_path)), TERM="dumb") as terminal:
        assert terminal.process.wait(60) == 0
        terminal.shows("no worker yet")
        assert not terminal.screen.is_other


@pytest.mark.parametrize("options", [("--redis-url", "redis://h:1"), ("--fleet-id", "a")])
def test_top_needs_redis_url_and_fleet_id_together(options: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["top", *options])
    assert isinstance(result.exception, ConfigError)
    assert "together" in str(result.exception)


def test_charts_of_what_is_counted_have_whole_numbers_only() -> None:
    whole = {chart["title"] for chart in PAGE_CHARTS if chart["isWhole"]}
    assert {"Queue", "Workers", "Failures", "Lag of weights", "Throughput"} <= whole
    assert not {"Return of episodes", "Length of episodes", "Processor time", "Time of workers"} & whole
