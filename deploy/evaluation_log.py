"""`RUN/evaluations.jsonl`: the evaluations of a run, one JSON object a line, the newest last."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from headrace.schemas.errors import RunDirError

_TAIL_BYTES = 64 * 1024


class EvaluationLog:
    """The file in a run directory. One process appends to it; others may read it at any time."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "evaluations.jsonl"
        self._read_at_ns = 0
        self._newest: dict[str, Any] | None = None

    def append(self, told: dict[str, Any]) -> None:
        """Append one evaluation, in one write. Raises `RunDirError`."""
        try:
            with self.path.open("ab", buffering=0) as file:
                if file.tell() and not self._ends_with_a_line():
                    file.write(b"\n")  # a writer was killed within its line
                file.write(orjson.dumps(told) + b"\n")
                os.fsync(file.fileno())
        except OSError as error:
            raise RunDirError(str(self.path), error.strerror or str(error)) from error

    def _ends_with_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def newest(self) -> dict[str, Any] | None:
        """Return the newest evaluation; None before the first. Reads the file only where it has changed."""
        try:
            changed_at_ns = self.path.stat().st_mtime_ns
            if changed_at_ns != self._read_at_ns:
                with self.path.open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                    found = [told for line in file.read().splitlines() if (told := _parse(line)) is not None]
                self._newest, self._read_at_ns = (found[-1] if found else None), changed_at_ns
        except OSError:
            return self._newest
        return self._newest

    def best_mean(self) -> float:
        """Return the highest mean return of all evaluations; minus infinity before the first."""
        return max((told["return"]["mean"] for told in self._all()), default=-math.inf)

    def since(self, unix_s: float) -> list[dict[str, Any]]:
        """Return the evaluations made after `unix_s`, the oldest first. Reads the file only where one was added."""
        newest = self.newest()
        if newest is None or _time_of(newest) <= unix_s:
            return []
        return [told for told in self._all() if _time_of(told) > unix_s]

    def _all(self) -> Iterator[dict[str, Any]]:
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            return
        yield from (told for line in lines if (told := _parse(line)) is not None)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the evaluation on a line; None for a line that is torn, or no evaluation."""
    try:
        told: Any = orjson.loads(line)
        float(told["return"]["mean"]), float(told["return"]["std"]), int(told["steps"]), int(told["episodes"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None
    return told  # type: ignore[no-any-return]


def _time_of(told: Mapping[str, Any]) -> float:
    return float(told.get("unix_s", 0.0))


def describe(told: Mapping[str, Any]) -> str:
    """Return an evaluation in a few words."""
    earned = told["return"]
    best = ", the best so far" if told.get("best") else ""
    return (
        f"mean return {earned['mean']:.4g} (std {earned['std']:.4g}) over {told['episodes']} episodes after "
        f"{told['steps']:,} steps{best}"
    )
