"""A learner of one's own that trains for a long time on each update: until a file says that it may go on.

python -m support.fleets.long_update RUN_DIR FILE
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.learner_stub import EpisodeStream, LearnerState, WeightPublisher
from headrace.workers.modules import actor_critic

STEPS = 1024
"""Least steps of an update."""
_PAUSE_S = 0.1


@contextmanager
def long_update(run_dir: Path, go: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the learner; kill it at the end of the block.

    `go` has one word: "train" ends the update, "leave" closes the stream without a commit.
    """
    command = [sys.executable, "-m", "support.fleets.long_update", str(run_dir), str(go)]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


def main(run_dir: str, go: Path) -> None:
    """Train on whole updates until the fleet ends; save and commit each."""
    pause, state = threading.Event(), LearnerState.of(run_dir, connect_timeout_s=150.0)
    saved = state.load()
    steps, position = (saved.steps, saved.position) if saved is not None else (0, None)
    with (
        EpisodeStream.of(run_dir, position=position, auto_commit=False, steps_per_update=STEPS) as stream,
        WeightPublisher.of(run_dir) as weights,
    ):
        module = actor_critic(stream.spaces())
        weights.publish(module.state_dict())
        trained = steps
        for batch in stream:
            steps += batch.steps
            if steps < trained + STEPS:
                continue
            while not (order := go.read_text() if go.exists() else ""):
                pause.wait(_PAUSE_S)
            if order == "leave":
                return
            state.save(stream, module.state_dict(), steps=steps)
            stream.commit()
            trained = steps


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
