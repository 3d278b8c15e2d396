"""`RUN/evaluations.jsonl`: the evaluations of a run, one JSON object a line, the newest last."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from headrace.schemas.accounts.aborted_episodes import doubt
from headrace.schemas.basics.run_files import opener
from headrace.schemas.errors import writing


class EvaluationLog:
    """The file in a run directory. One process appends to it; others may read it at any time."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "evaluations.jsonl"
        self.newest: dict[str, Any] | None = None
        """The newest evaluation that `take_new` has returned."""
        self._read_to = 0

    def append(self, told: dict[str, Any]) -> None:
        """Append one evaluation, in one write. Raises `RunDirError`."""
        with writing(self.path, "an evaluation"), open(self.path, "a+b", buffering=0, opener=opener) as file:
            if (end := file.seek(0, os.SEEK_END)) and os.pread(file.fileno(), 1, end - 1) != b"\n":
                file.write(b"\n")  # a writer was killed while it wrote a line
            file.write(orjson.dumps(told) + b"\n")
            os.fsync(file.fileno())

    def take_new(self) -> list[dict[str, Any]]:
        """Return the evaluations that were appended since the last call; the first time, all of them."""
        try:
            if self.path.stat().st_size <= self._read_to:
                return []
            with self.path.open("rb") as file:
                file.seek(self._read_to)
                read = file.read()
        except OSError:  # the file does not exist yet, or the run directory was removed
            return []
        whole = read[: read.rfind(b"\n") + 1]
        self._read_to += len(whole)
        new = [told for line in whole.splitlines() if (told := _parse(line)) is not None]
        self.newest = new[-1] if new else self.newest
        return new


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the evaluation on a line; None for a line that is torn."""
    try:
        told: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return told


def doubt_of(told: Mapping[str, Any]) -> str:
    """Return why the figures of an evaluation decide nothing: too many episodes were aborted; "" otherwise."""
    return doubt(told["episodes"], told.get("aborted", 0))


def describe(told: Mapping[str, Any]) -> str:
    """Return an evaluation in a few words."""
    earned = told["return"]
    why = doubt_of(told)
    best = ", the best so far" if told.get("best") else f"; it cannot be the best: {why}" if why else ""
    return (
        f"mean return {earned['mean']:.4g} (std {earned['std']:.4g}) over {told['episodes']} episodes after "
        f"{told['steps']:,} steps{best}"
    )
