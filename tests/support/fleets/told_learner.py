"""A learner that does what lines on its stdin say: publish weights, take batches, commit them, or train for ever.

python -m support.fleets.told_learner RUN_DIR
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.workers.modules import actor_critic

_PAUSE_S = 0.5


class ToldLearner:
    """The process, as the test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, order: str) -> None:
        """Send an order, and return once the learner has done it, or has begun to train."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{order}\n", "the learner has ended"


@contextmanager
def told_learner(run_dir: Path) -> Iterator[ToldLearner]:
    """Start a learner at the fleet of this run directory; kill it at the end of the block."""
    command = [sys.executable, "-m", "support.fleets.told_learner", str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield ToldLearner(process)
        finally:
            process.kill()


def main(run_dir: str) -> None:
    """Obey each line of stdin, and repeat it on stdout."""
    with EpisodeStream.of(run_dir, auto_commit=False) as stream, WeightPublisher.of(run_dir) as weights:
        module = actor_critic(stream.spaces())
        for line in sys.stdin:
            order = line.strip()
            if order == "publish":
                weights.publish(module.state_dict())
            elif order == "take":
                while stream.next(_PAUSE_S) is not None:
                    pass
            elif order == "commit":
                stream.commit()
            sys.stdout.write(line)
            sys.stdout.flush()
            if order == "train":
                for _ in stream:
                    stream.commit()
                    weights.publish(module.state_dict())


if __name__ == "__main__":
    main(sys.argv[1])
