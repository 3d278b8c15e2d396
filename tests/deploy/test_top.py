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

from headrace.deploy.command.monitoring_commands import app
from headrace.deploy.monitoring.facts import Facts, FactsReader
from headrace.deploy.monitoring.findings import Finding
from headrace.deploy.monitoring.fleet_state import SlowFacts, fleet_state
from headrace.deploy.monitoring.top.terminal import KeyParser
from headrace.deploy.monitoring.top.top import top as show
from headrace.deploy.monitoring.top.top_view import COLUMNS, TopState, blocks_for, head, plain, press, screen, sparkline
from headrace.deploy.run.redis_view import LearnerRowView, Snapshot
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.errors import ConfigError
from support.terminal_screen import OnTerminal
from support.waiting import wait_until

BLOCKS = blocks_for("utf-8")
CURVES = {"env_steps_per_s": [1.0, None, 3.0]}

HOLDS_A_TERMINAL = """
import sys
from headrace.deploy.monitoring.top.terminal import Terminal
with Terminal() as terminal:
    lines = ["here it is"]
    while True:
        terminal.draw(lines)
        for key in terminal.read_keys(60.0):
            if key == "q":
                sys.exit(0)
            if key == "x":
                raise RuntimeError("a bug")
            lines = [f"last key {key}"]
"""


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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ending", "code"),
    [("q", 0), ("x", 1), ("\x03", -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=str,
)
def test_the_terminal_is_restored_after_each_kind_of_end(ending: str | signal.Signals, code: int) -> None:
    with OnTerminal([sys.executable, "-c", HOLDS_A_TERMINAL]) as terminal:
        terminal.shows("here it is")
        assert terminal.screen.is_other
        assert terminal.modes() != terminal.modes_before
        if isinstance(ending, str):
            terminal.press(ending)
        else:
            terminal.process.send_signal(ending)
        assert terminal.process.wait(60) == code
        wait_until(lambda: not terminal.screen.is_other, "the first screen again")
        assert terminal.modes() == terminal.modes_before


@pytest.mark.processes
def test_a_signal_before_the_with_block_begins_restores_the_terminal() -> None:
    entered = HOLDS_A_TERMINAL.replace("with Terminal() as terminal:", "if terminal := Terminal().__enter__():")
    with OnTerminal([sys.executable, "-c", entered]) as terminal:
        terminal.shows("here it is")
        terminal.process.terminate()
        assert terminal.process.wait(60) == 128 + signal.SIGTERM
        wait_until(lambda: not terminal.screen.is_other, "the first screen again")
        assert terminal.modes() == terminal.modes_before


@pytest.mark.processes
def test_ctrl_z_gives_the_terminal_to_the_shell_until_fg(tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text(HOLDS_A_TERMINAL)
    with OnTerminal(["bash", "--norc", "--noprofile", "-i"], cwd=tmp_path, PS1="shell: ") as terminal:
        terminal.shows("shell: ")
        terminal.press(f"{sys.executable} hold.py\r")
        terminal.shows("here it is")
        terminal.press("\x1a")
        wait_until(lambda: not terminal.screen.is_other, "the first screen")
        terminal.press("echo sum $((20 + 22))\r")
        assert "echo sum $((20 + 22))" in terminal.shows("sum 42"), "the shell's own echo is off"
        terminal.press("fg\r")
        terminal.shows("here it is")
        assert terminal.screen.is_other
        terminal.press("k")
        terminal.shows("last key k")
        terminal.resize(40, 10)
        terminal.press("\x1b[B")
        terminal.shows("last key down")
        terminal.press("q")
        wait_until(lambda: not terminal.screen.is_other, "the first screen")
        terminal.press("echo end $((1 + $?))\r")
        assert "echo end $((1 + $?))" in terminal.shows("end 1")


def test_the_key_parser_joins_keys_that_arrive_in_parts() -> None:
    parser = KeyParser()
    sent = "s\x1b[A\x1bOB\x1b[5~\x1b[1;5Cé\r\x7f".encode()
    keys = [key for byte in sent for key in parser.feed(bytes([byte]))]
    assert keys == ["s", "up", "down", "page up", "é", "enter", "backspace"]
    assert parser.feed(b"\x1b") == []
    assert parser.waits
    assert parser.flush() == ["escape"]
    assert parser.feed(b"\x1bq") == ["escape", "q"]
    assert len(parser.feed(b"\x1b[" + b"1;" * 1000 + b"q")) < 3000
    assert not parser.waits


@pytest.mark.parametrize("size", [(80, 24), (40, 6), (10, 3), (1, 1), (200, 60)])
@pytest.mark.parametrize("count", [0, 64, 1000])
def test_a_screen_keeps_its_size_for_fleets_of_any_size(size: tuple[int, int], count: int) -> None:
    width, height = size
    finding = Finding("x", "error", "worker-1", "w" * 500, 900.0, "broker.lease_s = 3", "headrace " + "y" * 500)
    shown = {**crowd(count), "findings": [{**finding_facts(finding)} for _ in range(9)]}
    for view in ("fleet", "worker", "findings", "more", "help"):
        lines = screen(shown, CURVES, TopState(view=view, slot=3), width, height, BLOCKS)
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width


def finding_facts(finding: Finding) -> dict[str, Any]:
    found: dict[str, Any] = document({}, finding)["findings"][0]
    return found


def test_keys_choose_sort_filter_and_look_into_a_worker() -> None:
    state, fleet = TopState(), crowd(1000)

    def shown() -> str:
        return text_of(screen(fleet, CURVES, state, 80, 24, BLOCKS))

    def pressed(*keys: str) -> str:
        for key in keys:
            assert not press(state, key, fleet)
        return shown()

    assert "\n    0 connected" in shown()
    assert "999 connected" not in shown()
    assert "\n  999 connected" in pressed("end")
    assert state.slot == 999
    pressed("home", "down", "down")
    assert state.slot == 2
    lag = [column.name for column in COLUMNS].index("lag")
    by_lag = pressed(*"s" * lag)
    assert "vlag" in by_lag
    rows = [line.split() for line in by_lag.splitlines() if " connected " in line]
    assert len(rows) > 5
    assert {row[4] for row in rows} == {"4"}
    only = pressed("/", *"HOST-6", "backspace", "5", "enter")
    assert "only 'HOST-5'" in only
    assert pressed("home", "enter").startswith("worker-")
    assert state.slot is not None
    assert state.slot % 7 == 5
    assert "host-5" in shown()
    assert "Enter look into" in pressed("escape")
    assert "no worker has 'xyz'" in pressed("/", *"xyz", "enter", "enter", "down", "end")
    assert state.view == "fleet"
    assert "press f" not in pressed("escape", "?", "escape", "f", "escape")
    assert press(state, "q", fleet)


def test_texts_of_peers_cannot_move_the_cursor_or_break_a_line() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07\r\nnew\tline\u202e漢字漢字漢字漢字漢字"
    fleet = document(
        {0: {"host": hostile, "env_failure": hostile, "blocked": hostile, hostile: hostile, "pid": hostile}},
        Finding("x", "error", hostile, hostile, None, hostile, hostile),
    )
    for view in ("fleet", "worker", "findings", "more"):
        state = TopState(view=view, slot=0, text="漢")
        for lines in (screen(fleet, {}, state, 120, 40, BLOCKS), plain(fleet, {}, 120, BLOCKS)):
            assert all(character.isprintable() for line in lines for character in line.plain), view
        assert max(line.cell_len for line in screen(fleet, {}, state, 33, 40, BLOCKS)) <= 33


def test_aborted_episodes_stand_beside_finished_ones_within_80_columns() -> None:
    gauges = {"aborted_window": 100, "aborted_return_mean": 9.5, "aborted_len_mean": 7000.0}
    gauges |= {"episode_return_mean": 12.25, "episode_len_mean": 51.0}
    totals = {"aborted_episodes_total": 123_456, "env_steps_total": 9}
    facts = Facts(1000.0, Snapshot(fleet_id="demo", gauges=gauges, totals=totals))
    (line,) = [line for line in head(fleet_state(facts, []), {}, 80, BLOCKS) if line.plain.startswith("aborted")]
    assert line.plain == ("aborted      123,456: return 9.5 (finished 12.2), length 7,000 (finished 51)")
    assert line.cell_len <= 80
    assert "aborted" not in text_of(head(crowd(2), {}, 80, BLOCKS))


def test_more_shows_the_processes_redis_policies_peers_and_errors_of_the_page() -> None:
    workers = {0: {"serving": {"clients": 3, "requests_per_s": 40.0, "latency_p95_s": 0.0125}}}
    workers[1] = {"env_hosts": {"connected": 1, "wanted": 2}}
    errors = {
        where: EnvErrorRow(kind="env_hang", env="MyEnv", exception="TimeoutError", where=where, count=count)
        for where, count in (("a.py:1", 7), ("b.py:2", 1234))
    }
    policies = {"hunter": {"return_mean": 3.5, "return_min": 1.0, "return_max": 7.0, "len_mean": 41.0}}
    snapshot = Snapshot(fleet_id="demo", workers=workers, errors=errors, policies=policies)
    broker = ProcessState(name="broker", role="broker", pid=4711, rss_bytes=64 << 20, restarts=2)
    row = LearnerRowView(1, 1, 1000.0, 9, 1, {"loss": 0.25})
    facts = Facts(1000.0, snapshot, processes={"broker": broker}, learner_row=row)
    slow = SlowFacts(server={"maxmemory_policy": "noeviction"}, cpu_shares={"broker": 0.5})
    fleet, state = fleet_state(facts, [], slow), TopState()
    press(state, "m", fleet)
    shown = text_of(screen(fleet, {}, state, 80, 60, BLOCKS))
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for expected in (
        "broker running 4711 50 % 64 2",
        "maxmemory_policy noeviction",
        "loss 0.25",
        "hunter 3.5 (1 to 7) 41",
        "worker-0 3 clients, 40 requests/s, 95 % within 12.5 ms",
        "worker-1 1 of 2 env hosts",
        "at a.py:1, workers",
        "at b.py:2, workers",
    ):
        assert expected in lines, (expected, shown)
    assert any(line.startswith("1,234 x env_hang in MyEnv") for line in lines)
    press(state, "escape", fleet)
    assert state.view == "fleet"


def test_small_charts_show_the_newest_values() -> None:
    assert sparkline([9.0, 0.0, 1.0, 2.0, 7.0], 4, BLOCKS) == "▁▂▃█"
    assert sparkline([1.0, None, 1.0], 9, BLOCKS) == "▁ ▁"
    assert sparkline([None], 9, BLOCKS) == sparkline([1.0], 0, BLOCKS) == ""
    assert sparkline([0.0, 7.0], 2, blocks_for("ascii")) == ".@"


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
