"""The evaluator of a training run: the checkpoints that it evaluates, the best one that it keeps, and its log."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.annexes.policies.evaluation import EpisodeScores
from headrace.deploy.annexes.policies.evaluator import _Watcher, mean_return, watch
from headrace.deploy.report.progress import ProgressView
from headrace.deploy.report.run_rows import evaluation_row
from headrace.deploy.run.evaluation_log import EvaluationLog, describe
from headrace.deploy.run.goal import Goal, RunNumbers
from headrace.learner_stub.checkpoints.checkpoint import load_checkpoint
from headrace.schemas.errors import RunDirError
from headrace.schemas.settings.config_loading import load_config
from support.fleets.saved_runs import save_run
from support.waiting import wait_until


@contextmanager
def watched(run: Path, **learner: Any) -> Iterator[None]:
    """Watch the run as `headrace evaluate --watch` does; raise what that raises."""
    settings = {"evaluate_every_steps": 4096, **learner}
    flags = {f"learner.{key}": value for key, value in settings.items()}
    config, _ = load_config(run / "config.json", flags, {})
    stopping, failures = threading.Event(), list[BaseException]()

    def run_watch() -> None:
        try:
            watch(config, run, None, None, stopping)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run_watch)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(100)
    assert not failures, failures


def lines(run: Path) -> list[dict[str, Any]]:
    path = run / "evaluations.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def updates_of(path: Path) -> int:
    saved = load_checkpoint(path)
    assert saved is not None
    return int(saved.state["updates"])


@pytest.mark.long
def test_checkpoints_are_evaluated_as_steps_go_by_and_the_best_is_kept(tmp_path: Path) -> None:
    (tmp_path / "evaluating.4711.checkpoint").write_bytes(b"of a process that was killed")
    save_run(tmp_path, updates=1)
    with watched(tmp_path):
        save_run(tmp_path, updates=3, seed=4)
        wait_until(lambda: len(lines(tmp_path)) == 1, "an evaluation")
        save_run(tmp_path, updates=4, seed=5)  # too soon after the one before
        for updates, seed in ((9, 6), (12, 7), (15, 8)):
            before = len(lines(tmp_path))
            save_run(tmp_path, updates=updates, seed=seed)
            wait_until(lambda before=before: len(lines(tmp_path)) == before + 1, "another")  # type: ignore[misc]
    told = lines(tmp_path)
    assert [line["update"] for line in told] == [3, 9, 12, 15]
    assert [line["steps"] for line in told] == [2048 * line["update"] for line in told]
    means = [line["return"]["mean"] for line in told]
    assert [line["best"] for line in told] == [mean > max([0.0, *means[:at]]) for at, mean in enumerate(means)]
    assert updates_of(tmp_path / "best.checkpoint") == max(told, key=lambda line: line["return"]["mean"])["update"]
    assert not list(tmp_path.glob("evaluating.*"))

    with watched(tmp_path):  # another life goes on with what is known
        save_run(tmp_path, updates=18, seed=4)
        wait_until(lambda: len(lines(tmp_path)) == 5, "an evaluation after a restart")
    last = lines(tmp_path)[-1]
    assert (last["update"], last["return"]) == (18, told[0]["return"]), "the same policy plays the same episodes"
    assert not last["best"]


def test_the_best_of_several_policies_is_by_the_return_of_those_in_training() -> None:
    by_policy = {"learns": {"mean": 3.0}, "other": {"mean": 1.0}, "earlier": {"mean": -4.0}}
    told = {"return": {"mean": 0.0}, "return_by_policy": by_policy}
    assert mean_return(told, ["learns", "other"]) == 4.0
    assert mean_return(told, []) == 0.0
    assert mean_return({"return": {"mean": 5.0}}, ["learns"]) == 5.0, "of an env of one agent"


def test_an_evaluation_that_leaves_out_many_episodes_is_not_the_best(tmp_path: Path) -> None:
    before = {"unix_s": 1.0, "steps": 1, "return": {"mean": 1e9}, "episodes": 10, "aborted": 9}
    EvaluationLog(tmp_path).append(before)
    evaluation, unwanted = _Evaluation(), threading.Event()
    watcher = _Watcher(tmp_path, 1, evaluation, [])  # type: ignore[arg-type]
    for updates, mean, aborted in ((2, 5.0, 0), (3, 9.0, 1), (4, 6.0, 0)):
        evaluation.scores = EpisodeScores([0], returns=[mean] * 10, lengths=[1] * 10, aborted=aborted)
        save_run(tmp_path, updates=updates)
        watcher.look(unwanted)
    first, second, third = lines(tmp_path)[1:]
    assert [first["best"], second["best"], third["best"]] == [True, False, True], "not that before, not 1 of 11"
    assert "it cannot be the best: 1 of 11 episodes were aborted (9.1 %), more than 5 %" in describe(second)
    assert evaluation_row(second, None, 0.0)["evaluation/aborted"] == 1


class _Evaluation:
    scores = EpisodeScores([0])

    def play(self, *_: Any) -> EpisodeScores:
        return self.scores


def test_a_run_directory_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run(tmp_path)
    config, _ = load_config(tmp_path / "config.json", {"learner.evaluate_every_steps": 1}, {})
    (tmp_path / "evaluating.1.checkpoint").touch()

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for left in ([tmp_path / "evaluating.1.checkpoint"], []):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", read_only)
            with pytest.raises(RunDirError, match="Read-only file system"):
                watch(config, tmp_path, None, None, threading.Event())
        for path in left:
            path.unlink()


def test_a_torn_line_is_left_out_and_the_next_line_is_whole(tmp_path: Path) -> None:
    log, reader = EvaluationLog(tmp_path), EvaluationLog(tmp_path)
    assert (reader.take_new(), reader.newest) == ([], None)
    spread = {"mean": 3.0, "std": 0.5, "min": 2.5, "max": 3.5}
    told = {"unix_s": 1.5, "learner_epoch": 1, "steps": 10, "episodes": 2, "return": spread, "length": spread}
    told["best"] = True
    log.append(told)
    assert (reader.take_new(), reader.take_new(), reader.newest) == ([told], [], told)
    with log.path.open("ab") as file:
        file.write(b'{"steps": 20, "ret')
    assert reader.take_new() == []
    later = {**told, "steps": 30, "return": {**spread, "mean": 2.0}}
    log.append(later)
    assert (reader.take_new(), reader.newest) == ([later], later)
    assert EvaluationLog(tmp_path).take_new() == [told, later]
    view = ProgressView(1.0, RunNumbers(), Goal(), evaluation=told)
    assert ("evaluation", "mean return 3 (std 0.5) over 2 episodes after 10 steps, the best so far") in view.rows()


@pytest.mark.parametrize("content", [b"", b'{"return":\n'])
def test_a_torn_log_has_no_evaluations(tmp_path: Path, content: bytes) -> None:
    log = EvaluationLog(tmp_path)
    log.path.write_bytes(content)
    assert (log.take_new(), log.newest) == ([], None)
