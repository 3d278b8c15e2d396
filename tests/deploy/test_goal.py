"""Goals, views and summaries of a run."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from headrace.broker.files.report_file import RedisAway
from headrace.deploy.report.progress import ProgressDisplay, ProgressView, progress_table
from headrace.deploy.report.summary import RunFacts, Summary, ledger_table, next_commands, print_summary, read_run_facts
from headrace.deploy.run.goal import Goal, RunNumbers, show_return
from headrace.deploy.run.redis_view import Snapshot
from headrace.deploy.terminal.console import PrintableConsole
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.figures import added_up
from headrace.schemas.accounts.ledger import FleetLedger
from headrace.schemas.errors import HeadraceError
from headrace.schemas.settings.config import FleetConfig

START = RunNumbers(steps=1000, episodes=50, mean_return=480.0, window=100)
FIFTY_PER_S = Snapshot(gauges={"env_steps_per_s": 50.0})
BOOKS = FleetLedger(
    stepped=100, committed=(60, 6), queued=20, dropped={"stale": (15, 2)}, discarded={"worker_killed": 5}
)


def test_a_return_counts_over_a_hundred_episodes_only() -> None:
    goal = Goal(until_return=475.0)
    assert not goal.reached(RunNumbers(2000, 99, 500.0, 99), RunNumbers())
    assert goal.reached(RunNumbers(2000, 100, 475.0, 100), RunNumbers())
    assert not goal.reached(RunNumbers(2000, 100, 474.9, 100), RunNumbers())
    assert not goal.reached(RunNumbers(2000, 0, None, 0), RunNumbers())


def test_a_return_that_leaves_out_more_than_five_percent_reaches_no_goal_and_says_why() -> None:
    goal, few = Goal(until_return=475.0), RunNumbers(2000, 100, 480.0, 100, aborted=5)
    many = replace(few, aborted=6)
    assert goal.reached(few, RunNumbers())
    assert goal.withheld(few, RunNumbers()) == ""
    assert not goal.reached(many, RunNumbers())
    assert (few.best_return, many.best_return) == (480.0, None)
    said = "6 of 106 episodes were aborted (5.7 %), more than 5 %, and are in no mean"
    assert goal.withheld(many, RunNumbers()) == f"a mean return of 480.0 does not reach the goal: {said}"
    assert goal.withheld(replace(many, mean_return=474.0), RunNumbers()) == ""
    assert Goal(until_steps=5).reached(many, RunNumbers())
    assert Goal(until_return=475.0, until_steps=5).withheld(many, RunNumbers()) == ""
    (way,) = (value for what, value in ProgressView(1.0, many, goal).rows() if what == "goal")
    assert way == "0 % (too many aborted)"


def test_a_mean_return_says_how_many_episodes_it_leaves_out_above_one_percent() -> None:
    gauges = {"episode_return_mean": 2.0, "episodes_window": 100.0, "episodes_window_aborted": 2.0}
    assert RunNumbers.of(gauges, {}).show_mean_return() == "2.000 over 100 (2 of 102 aborted, 2 %)"
    assert RunNumbers.of({**gauges, "episodes_window_aborted": 1.0}, {}).show_mean_return() == "2.000 over 100"
    numbers = RunNumbers.of({**gauges, "episodes_window_aborted": 100.0}, {}, {"a": {"return_mean": 1.0}})
    assert numbers.show_mean_return() == "2.000 over 100 (a 1.000; 100 of 200 aborted, 50 %)"


def test_numbers_of_an_earlier_run_reach_no_goal() -> None:
    assert not Goal(until_return=475.0).reached(START, START)
    assert not Goal(until_steps=500).reached(START, START)
    assert not Goal(until_steps=500).reached(RunNumbers(steps=1499), START)
    assert Goal(until_steps=500).reached(RunNumbers(steps=1500), START)


def test_without_a_goal_nothing_is_reached_or_late() -> None:
    assert not Goal().reached(RunNumbers(10**9, 10**6, 1e9, 100), RunNumbers())
    assert not Goal().late(1e9)
    assert Goal(timeout_s=5.0).late(5.0)


def test_a_time_alone_is_a_goal_for_a_run_that_made_steps() -> None:
    later = RunNumbers(steps=START.steps + 1)
    assert Goal(timeout_s=5.0).has_done_its_time(5.0, later, START)
    assert not Goal(timeout_s=5.0).has_done_its_time(4.9, later, START)
    assert not Goal(timeout_s=5.0).has_done_its_time(5.0, START, START)
    assert not Goal().has_done_its_time(1e9, later, START)
    for goal in (Goal(until_return=1.0, timeout_s=5.0), Goal(until_steps=9, timeout_s=5.0)):
        assert not goal.has_done_its_time(5.0, later, START)


def test_a_negative_mean_return_is_a_number_and_none_is_absent() -> None:
    assert RunNumbers.of({"episode_return_mean": -200.0, "episodes_window": 3.0}, {}).mean_return == -200.0
    assert RunNumbers.of({"episode_return_mean": 0.0, "episodes_window": 0.0}, {}).mean_return is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (475.34, "475.3"),
        (-1234.56, "-1234.6"),
        (9.3421, "9.342"),
        (0.0123, "0.01230"),
        (0.0, "0.0"),
        (1e-12, "0.00000000"),
    ],
)
def test_a_mean_return_shows_four_of_its_digits(value: float, shown: str) -> None:
    assert show_return(value) == shown


def test_the_mean_return_of_each_policy_is_shown_beside_that_of_all() -> None:
    policies = {"short": {"return_mean": 1.5, "agents": 9.0}, "long": {"return_mean": 20.25}}
    numbers = RunNumbers.of({"episode_return_mean": 21.75, "episodes_window": 9.0}, {}, policies)
    assert numbers.show_mean_return() == "21.75 over 9 (short 1.500, long 20.25)"
    assert RunNumbers().show_mean_return() == "-"


def test_weights_lag_is_the_lag_of_the_worker_furthest_behind() -> None:
    workers = {0: {"weights_behind": 2}, 1: {"weights_behind": 5}, 2: {"weights_behind": -1}, 3: {}}
    assert added_up(workers.values())["weights_lag"] == 5
    assert added_up([{"weights_behind": -1}])["weights_lag"] == 0
    assert added_up([]) == {}


def test_without_a_terminal_progress_is_a_line_every_few_seconds() -> None:
    stream = io.StringIO()
    view = ProgressView(
        *(12.0, START, Goal(until_return=475.0)),
        snapshot=Snapshot(gauges={"env_steps_per_s": 8200.0, "learner_epoch": 2.0, "weights_seq": 3.0}),
        restarts={"worker": 1, "broker": 0},
    )
    with ProgressDisplay(stream) as progress:
        progress.show(view)
        progress.show(view)
    (line,) = stream.getvalue().splitlines()
    for part in (
        "env steps 1,000 (8,200/s)",
        "mean return 480.0 over 100 of 475",
        "restarts 1 (worker)",
        "weights 2/3 (lag 0)",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("goal", "numbers", "said"),
    [
        (Goal(until_steps=4000), RunNumbers(1900), "22 %, about 1 min 2 s left"),
        (Goal(until_steps=4000), RunNumbers(5010), "100 %"),
        (Goal(until_steps=4000, until_return=475.0), RunNumbers(1900), "22 %, about 1 min 2 s left at most"),
        (Goal(until_steps=4000, timeout_s=40.0), RunNumbers(1900), "22 %, the time ends in 10 s"),
        (Goal(until_steps=4000, timeout_s=99.0), RunNumbers(1900), "22 %, about 1 min 2 s left"),
        (Goal(until_return=475.0), RunNumbers(1900, 9, 200.0, 100), "39 %"),
        (Goal(until_return=475.0), RunNumbers(1900, 9, 10.0, 100), "0 %"),
        (Goal(until_return=475.0), RunNumbers(1900, 9, 474.9, 100), "99 %"),
        (Goal(until_return=475.0), RunNumbers(1900, 9, 480.0, 37), "0 % (37 of 100 episodes)"),
        (Goal(until_return=475.0, timeout_s=90.0), RunNumbers(1900, 9, 200.0, 100), "39 %, the time ends in 1 min"),
        (Goal(timeout_s=120.0), RunNumbers(1900), "25 %, 1 min 30 s left"),
    ],
)
def test_the_way_to_the_goal_is_told_with_a_time_only_where_one_is_known(
    goal: Goal, numbers: RunNumbers, said: str
) -> None:
    view = ProgressView(30.0, numbers, goal, RunNumbers(1000, mean_return=22.0), FIFTY_PER_S)
    assert dict(view.rows())["goal"] == said


def test_a_return_that_begins_below_zero_counts_from_there() -> None:
    view = ProgressView(30.0, RunNumbers(9, 9, -500.0, 100), Goal(until_return=-200.0), RunNumbers(mean_return=-1200.0))
    assert dict(view.rows())["goal"] == "70 %"


def test_no_time_is_told_by_an_old_rate_or_without_a_step_and_no_way_without_a_goal() -> None:
    goal, numbers = Goal(until_steps=4000), RunNumbers(1000)
    assert dict(ProgressView(9.0, numbers, goal, snapshot=FIFTY_PER_S, redis_age_s=7.0).rows())["goal"] == "25 %"
    assert dict(ProgressView(9.0, numbers, goal).rows())["goal"] == "25 %"
    assert "goal" not in dict(ProgressView(9.0, numbers, Goal(), snapshot=FIFTY_PER_S).rows())


def test_on_a_terminal_the_way_to_the_goal_has_a_bar() -> None:
    console = PrintableConsole(io.StringIO())
    console.print(progress_table(ProgressView(9.0, RunNumbers(1000), Goal(until_steps=4000), snapshot=FIFTY_PER_S)))
    (line,) = (line for line in console.file.getvalue().splitlines() if "goal" in line)  # type: ignore[attr-defined]
    assert line.count("━") >= 7
    assert "25 %, about 1 min left" in line


def test_the_progress_view_marks_old_numbers_of_redis() -> None:
    rows = dict(ProgressView(1.0, RunNumbers(), Goal(), redis_age_s=7.0).rows())
    assert rows["Redis"] == "silent for 7 s, numbers are old"
    newer = replace(FIFTY_PER_S, away=RedisAway(0.0, "READONLY"))
    rows = dict(ProgressView(1.0, RunNumbers(1000), Goal(until_steps=4000), snapshot=newer, redis_age_s=7.0).rows())
    assert rows["Redis"] == "away for 7 s, numbers are the broker's"
    assert rows["goal"] == "25 %, about 1 min left"


def test_the_progress_view_names_lost_steps_and_the_first_cause_of_failures() -> None:
    worker = {"env_failures": 7, "env_failure": "env_exception in env 1: RuntimeError: now\n", "env_failure_age_s": 2.0}
    first = EnvErrorRow(
        kind="env_bad_data",
        exception="EnvContractError",
        message="observation should be within [-1, 1],\x1b got 2",
        count=4,
        first_unix_s=5.0,
    )
    other = EnvErrorRow(kind="env_exception", exception="RuntimeError", message="now", count=3, first_unix_s=9.0)
    ledger = FleetLedger(stepped=20_000, discarded={"env_bad_data": 1150, "env_exception": 50, "shutdown": 0})

    def rows(**errors: EnvErrorRow) -> dict[str, str]:
        snapshot = Snapshot(workers={0: worker}, fleet=ledger, errors=errors)
        return dict(ProgressView(1.0, RunNumbers(), Goal(), snapshot=snapshot).rows())

    assert rows()["discarded"] == "1,200 steps (6 % of all: env_bad_data 1,150, env_exception 50)"
    newest = "7, the newest 2 s ago (worker-0: env_exception in env 1: RuntimeError: now\\n)"
    assert rows(a=other)["env failures"] == newest
    bad = "env_bad_data: EnvContractError: observation should be within [-1, 1],\\x1b got 2"
    assert rows(a=other, b=first)["env failures"] == f"{newest}, the first ({bad}, 4 of this kind)"
    assert "discarded" not in dict(ProgressView(1.0, RunNumbers(), Goal()).rows())


def summary_of(ledger: FleetLedger | None, failure: HeadraceError | None = None) -> Summary:
    return Summary(
        fleet_id="f",
        run_dir="/r",
        seconds=2.0,
        start=START,
        end=RunNumbers(steps=3000, episodes=70, mean_return=470.0, window=100),
        at_goal=RunNumbers(steps=2900, episodes=69, mean_return=475.5, window=100),
        restarts={"worker": 1},
        weights_seq=4,
        ledger=ledger,
        failure=failure,
    )


def test_the_summary_has_the_mean_return_of_the_moment_the_goal_was_reached() -> None:
    found = orjson.loads(summary_of(BOOKS).as_json())
    assert found["mean_return"] == 475.5
    assert found["rates"] == {"env_steps_per_s": 1000.0, "episodes_per_s": 10.0}
    assert (found["steps"], found["balanced"], found["exit_code"], found["error"]) == (100, True, 0, None)
    assert found["ledger"]["discarded"] == {"worker_killed": 5}


def test_an_unreadable_ledger_is_not_called_balanced() -> None:
    found = orjson.loads(summary_of(None, HeadraceError("it broke")).as_json())
    assert (found["ledger"], found["balanced"], found["steps"]) == (None, None, 3000)
    assert (found["error"], found["exit_code"]) == ("it broke", 1)


def test_a_start_that_read_no_redis_keeps_the_figures_of_the_earlier_end_in_the_summary(tmp_path: Path) -> None:
    RunFacts(tmp_path).finish(replace(summary_of(BOOKS), problems=["old"]), [], Snapshot("f"))
    end = RunNumbers()
    refused = replace(summary_of(None, HeadraceError("refused")), start=end, end=end, at_goal=None, weights_seq=0)
    RunFacts(tmp_path).finish(refused, [], Snapshot("f"))
    found = read_run_facts(tmp_path)
    assert (found["env_steps"], found["mean_return"], found["weights_seq"]) == (3000, 475.5, 4)
    assert (found["ledger"]["stepped"], found["balanced"], found["problems"]) == (100, False, ["old"])
    assert (found["state"], found["error"], found["goal_reached"]) == ("ended", "refused", False)


def test_the_end_names_the_commands_that_play_the_policy_and_repeat_the_newest_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run" / "failures").mkdir(parents=True)
    ended, config = replace(summary_of(BOOKS), run_dir=str(tmp_path / "my run")), FleetConfig()
    assert next_commands(ended, config) == []
    (tmp_path / "my run" / "failures" / "0-1-3.failure").touch()
    (tmp_path / "my run" / "learner.checkpoint").touch()
    rerun = "repeat the newest failure of an env: headrace rerun 'my run' --failure 0-1-3"
    assert next_commands(ended, config) == ["play its policy: headrace evaluate 'my run'", rerun]
    failed = replace(ended, ledger=None, end=RunNumbers(), failure=HeadraceError("no env could be reset"))
    assert next_commands(failed, config) == [rerun]


@pytest.mark.parametrize(("queued", "says"), [(20, "adds up"), (19, "does NOT add up: +1 steps")])
def test_the_final_table_names_every_loss_and_says_whether_it_adds_up(queued: int, says: str) -> None:
    stream = io.StringIO()
    print_summary(summary_of(BOOKS.model_copy(update={"queued": queued})), stream)
    text = stream.getvalue()
    later = f"{queued} agent steps still queued, dropped when the run goes on"
    for part in ("dropped: stale", "discarded: worker_killed", "475.5 over 100", says, later):
        assert part in text
    assert ledger_table(BOOKS).row_count == 5
