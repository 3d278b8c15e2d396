"""One of two ranks that read for the learner's group, in a process of its own.

python -m support.fleets.rank_reader RUN_DIR FILE RANK RANKS

Rank 1 writes what it was handed in a round into a file of its own. Rank 0 waits for this file, and writes a line of
FILE, as `group_reader` does, with the observations of both. A new process of rank 1 joins, and then asks rank 0 for the
number of the round that comes next. Both go on in a new process after an error.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

import orjson

from headrace.learner_stub import EpisodeStream, WeightPublisher
from support.fleets.group_reader import observed, read_lines

BATCHES = 2
WAIT_S = 0.3


def write(path: Path, content: Any) -> None:
    """Write JSON so that a reader finds all of it or nothing."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(orjson.dumps(content))
    part.replace(path)


def read(path: Path) -> Any:
    return orjson.loads(path.read_bytes()) if path.exists() else None


class Notes:
    """The files by which the two ranks talk. `life` names a process of rank 0."""

    def __init__(self, file: Path) -> None:
        self.asked = file.with_name("rank1.asks")
        self.answer = file.with_name("rank1.answer")
        self.life = file.with_name("rank0.life")
        self._file = file

    def steps(self, life: int, number: int) -> Path:
        return self._file.with_name(f"rank1.{life}.{number}.steps")

    def answer_rank(self, life: int, number: int) -> None:
        """Tell a new process of rank 1 the number of its next round, in which it gets all that it got before again."""
        asks = read(self.asked)
        told = read(self.answer)
        if asks is not None and (told is None or told[:2] != [asks, life]):
            self.steps(life, number).unlink(missing_ok=True)
            write(self.answer, [asks, life, number])


def rank_zero(run_dir: str, file: Path, ranks: Literal["shared", "fixed"]) -> None:
    notes, lines, life = Notes(file), read_lines(file), os.getpid()
    position = lines[-1]["position"] if lines else None
    write(notes.life, life)
    with ExitStack() as stack:
        from headrace import actor_critic

        out = stack.enter_context(file.open("ab"))
        options: dict[str, Any] = {"rank": 0, "world_size": 2, "ranks": ranks, "auto_commit": False}
        stream = stack.enter_context(EpisodeStream.of(run_dir, position=position, **options))
        weights = stack.enter_context(WeightPublisher.of(run_dir))
        weights.publish(actor_critic(stream.spaces()).state_dict())
        for number in count():
            while not (batches := stream.round_of(BATCHES, WAIT_S)):
                notes.answer_rank(life, number)
                if stream.ended:
                    return
            steps = [pair for batch in batches for pair in observed(batch)]
            while (theirs := read(notes.steps(life, number))) is None:
                notes.answer_rank(life, number)
                stream.pump(0.02)
                position = stream.position()  # raises where the batches of a lost rank go elsewhere
            notes.steps(life, number).unlink()
            out.write(orjson.dumps({"steps": steps + theirs, "position": stream.position()}) + b"\n")
            out.flush()
            stream.commit()


def rank_one(run_dir: str, file: Path, ranks: Literal["shared", "fixed"]) -> None:
    notes = Notes(file)
    with EpisodeStream.of(run_dir, rank=1, world_size=2, ranks=ranks, auto_commit=False) as stream:
        write(notes.asked, os.getpid())
        while (answer := read(notes.answer)) is None or answer[0] != os.getpid() or answer[1] != read(notes.life):
            stream.pump(0.02)  # raises once another rank 0 is there
        _, life, first = answer
        for number in count(first):
            while not (batches := stream.round_of(BATCHES, WAIT_S)):
                if stream.ended or read(notes.life) != life:
                    return
            write(notes.steps(life, number), [pair for batch in batches for pair in observed(batch)])
            stream.commit()


if __name__ == "__main__":
    rank = (rank_zero, rank_one)[int(sys.argv[3])]
    rank(sys.argv[1], Path(sys.argv[2]), cast("Any", sys.argv[4]))
