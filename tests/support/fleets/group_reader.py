"""A reader of a consumer group in a process of its own. It writes what it was handed before it commits.

python -m support.fleets.group_reader RUN_DIR GROUP FILE [SECONDS_A_BATCH]

Each line of FILE is JSON: the observations of the batches since the line before, and the position after them. The next
process leaves out a line that a kill has cut short, and goes on from the last whole one.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace.learner_stub import EpisodeStream, WeightPublisher

BATCHES = 8


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, and cut off what a kill has left of the next one."""
    text = path.read_bytes() if path.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        path.write_bytes(whole)
    return [orjson.loads(line) for line in whole.splitlines()]


def observed(batch: Any) -> list[list[int]]:
    """(life, number) of each step's observation."""
    steps = [np.asarray(chunk.obs)[:-1] for chunk in batch if len(chunk)]
    return np.concatenate(steps).astype(np.int64).tolist() if steps else []


def main(run_dir: str, group: str, file: str, seconds: str = "0") -> None:
    lines = read_lines(Path(file))
    position = lines[-1]["position"] if lines else None
    with ExitStack() as stack:
        out = stack.enter_context(Path(file).open("ab"))
        stream = stack.enter_context(EpisodeStream.of(run_dir, group=group, position=position, auto_commit=False))
        if group == "train":
            from headrace import actor_critic

            weights = stack.enter_context(WeightPublisher.of(run_dir))
            weights.publish(actor_critic(stream.spaces()).state_dict())
        steps: list[list[int]] = []
        batches = 0
        while not stream.ended:
            batch = stream.next(0.3)
            if batch is not None:
                steps += observed(batch)
                batches += 1
                time.sleep(float(seconds))
            if batches == BATCHES or batch is None:
                out.write(orjson.dumps({"steps": steps, "position": stream.position()}) + b"\n")
                out.flush()
                stream.commit()
                steps, batches = [], 0


if __name__ == "__main__":
    main(*sys.argv[1:])
