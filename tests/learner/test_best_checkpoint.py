"""The best checkpoint by a full window of returns: restarts keep it, and a replaced learner cannot change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from headrace.learner_stub.reference.best_checkpoint import BestCheckpoint


class Life:
    """A learner of some epoch that saves one checkpoint after another."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.path, self.epoch = folder / "learner.checkpoint", epoch
        self.best = BestCheckpoint(self.path, epoch)

    def save(self, updates: int, returns: list[float]) -> None:
        state = {"updates": updates, "recent_returns": returns}
        save_checkpoint(self.path, Checkpoint(self.epoch, [], state))
        self.best.saved(sum(returns) / len(returns) if len(returns) == 100 else None)


def best_of(folder: Path) -> int | None:
    saved = load_checkpoint(folder / "best.checkpoint")
    return None if saved is None else int(saved.state["updates"])


def test_the_checkpoint_with_the_best_full_window_is_kept_over_restarts(tmp_path: Path) -> None:
    life = Life(tmp_path, 1)
    for updates, returns, kept in (
        (1, [900.0] * 99, None),
        (2, [5.0] * 100, 2),
        (3, [4.0] * 100, 2),
        (4, [6.0] * 100, 4),
    ):
        life.save(updates, returns)
        assert best_of(tmp_path) == kept
    again = Life(tmp_path, 2)
    again.save(5, [5.5] * 100)
    assert best_of(tmp_path) == 4
    again.save(6, [7.0] * 100)
    assert best_of(tmp_path) == 6
    again.save(7, [7.0] * 100)
    names = {"learner.checkpoint", "learner.checkpoint.previous", "best.checkpoint"}
    assert {file.name for file in tmp_path.iterdir()} == names


def test_too_many_aborted_episodes_leave_the_best_checkpoint_which_the_log_says_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path, 1)
    life.save(1, [1.0] * 100)
    life.best.saved(0.5, "many aborted")
    assert not caplog.records, "it is not the best in any case"
    save_checkpoint(life.path, Checkpoint(1, [], {"updates": 2}))
    for _ in range(3):
        life.best.saved(9.0, "many aborted")
    assert best_of(tmp_path) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "a mean return of 9 makes no best checkpoint: many aborted"
    ]
    life.save(3, [2.0] * 100)
    assert best_of(tmp_path) == 3


def test_a_replaced_learner_does_not_change_the_best_checkpoint(tmp_path: Path) -> None:
    old, new = Life(tmp_path, 1), Life(tmp_path, 2)
    new.save(9, [3.0] * 100)
    new.save(10, [2.0] * 100)
    old.best.saved(1000.0)  # it saved before the other one took over, and was stopped until now
    assert best_of(tmp_path) == 9
    new.save(11, [4.0] * 100)
    assert best_of(tmp_path) == 11


def test_a_damaged_best_checkpoint_is_dropped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "best.checkpoint").write_bytes(b"torn")
    life = Life(tmp_path, 1)
    assert "the best checkpoint so far is dropped" in caplog.text
    life.save(1, [1.0] * 100)
    assert best_of(tmp_path) == 1


def test_the_best_checkpoint_of_several_policies_is_by_the_mean_of_their_means(tmp_path: Path) -> None:
    state = {"modules": {"a": {"recent_returns": [4.0] * 100}, "b": {"recent_returns": [8.0] * 100}}}
    save_checkpoint(tmp_path / "best.checkpoint", Checkpoint(1, [], {**state, "updates": 3}))
    life = Life(tmp_path, 1)
    life.save(4, [5.9] * 100)
    assert load_checkpoint(tmp_path / "best.checkpoint").state["updates"] == 3  # type: ignore[union-attr]
    life.save(5, [6.1] * 100)
    assert best_of(tmp_path) == 5
