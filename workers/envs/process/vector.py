"""Envs in other processes of this machine, as a vector that a sampler steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.backend import EnvBackend
from headrace.workers.envs.process.elsewhere import ElsewhereVector
from headrace.workers.envs.process.pool import EnvProcessPool


class ProcessVector(ElsewhereVector):
    """Lanes of an `EnvProcessPool`."""

    def _open_pool(self, config: EnvRunnerConfig) -> EnvBackend:
        return EnvProcessPool(config, self._worker_index, self._seed_for)

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        """See `EnvDriver`. Takes as long as the env does, and a step's deadline at most; then its process is lost."""
        self._catch_up()
        if self.lanes[index].env is None or index in self._coming or index in self._lost:
            return None
        pool = self._running
        assert isinstance(pool, EnvProcessPool), "_open_pool() gives one"
        pool.render(index)
        while True:
            answers = self._hear()
            self._put_aside(answers)
            if answers.pictures or index in self._lost:
                return dict(answers.pictures).get(index)
