"""What every env runner offers, whatever it steps."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from headrace.schemas.errors import ModuleError
from headrace.schemas.ledger import Discard
from headrace.schemas.spaces import Spaces
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.metrics.runner_metrics import RunnerMetrics
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.columns import PolicyColumns
from headrace.workers.randomness.seeds import SeedTree, episode_id_high
from headrace.workers.runner.runner_state import Version
from headrace.workers.runner.taken_over import TakenOver, take_over
from headrace.workers.sampling.loop import Batch, Sampler, SamplingLoop

_OWN_SETTINGS = ("env_config", "module_config", "env_to_module", "module_to_env")
"""What a runner copies, so that neither it nor its caller sees what the other changes later."""


class EnvRunner(SamplingLoop[Batch]):
    """Steps environments with a policy and gives episode chunks. One thread at a time; usable in a `with` block."""

    def __init__(self, config: EnvRunnerConfig, worker_index: int, incarnation: int, run_uid: str) -> None:
        own = {name: copy.deepcopy(getattr(config, name)) for name in _OWN_SETTINGS}
        self.config = config.model_copy(update=own)
        self.worker_index = worker_index
        self.incarnation = incarnation
        self.totals = RunnerTotals()
        self._metrics = RunnerMetrics(config, self.totals)
        self.callbacks = CallbackList(config.callbacks, self._callback_arguments)
        self._seeds = SeedTree(config.seed, worker_index, incarnation, config.num_envs)
        self._id_high = episode_id_high(run_uid, self._seeds.entropy, worker_index, incarnation)
        self._version = Version()
        self._waiting = None
        self._stopped = False
        self.steps_elsewhere: int | None = None
        """Env steps of the fleet that others than this runner made, as far as is known; None without a fleet."""
        self._sampler: Sampler | None = None
        torch.set_num_threads(config.torch_threads)

    # -- what the kinds of runner do each in its own way --------------------------------------------------------------

    @abstractmethod
    def _make_envs(self) -> None:
        """Build all envs from the config, or build them anew, and let the module, if there is one, see them."""

    @abstractmethod
    def make_module(self) -> None:
        """Build the policy anew from the config."""

    @abstractmethod
    def get_metrics(self) -> dict[str, Any]:
        """Steps and completed episodes since the last call, and lifetime sums."""

    @abstractmethod
    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Module id -> (observation space, action space), as the env has them."""

    @property
    @abstractmethod
    def module_spaces(self) -> dict[str, Spaces]:
        """Module id -> the spaces its chunks have, as data, in one order in every process of a fleet."""

    @abstractmethod
    def policy_columns(self) -> dict[str, PolicyColumns]:
        """What batches of external envs have here, by module, for who takes over those of others.

        Raises `ModuleError` where there is no module to ask.
        """

    @abstractmethod
    def call_before_rebuilds(self, on_rebuild: Callable[[], None]) -> None:
        """Have `on_rebuild` called before each rebuild of an env: whoever watches this process must be patient then."""

    @property
    def _hangs(self) -> bool:
        return self._sampler is not None and self._sampler.hangs

    def _abandon(self, reason: Discard) -> None:
        self._vector.abandon(reason)

    def make_env(self) -> None:
        """Build all envs anew from the config, closing what was there. Open episodes are over.

        Raises `MissingEnvError`, `UnknownEnvError`, or `EnvError` caused by the env's own error; without envs then.
        """
        self.callbacks.check_at_rest("make_env()")
        self._stopped = True
        self._make_envs()
        self._stopped = False

    # -- what else one may ask ----------------------------------------------------------------------------------------

    def _callback_arguments(self) -> dict[str, Any]:
        return {"env_runner": self, "metrics_logger": self._metrics.logger, "rl_module": getattr(self, "module", None)}

    @property
    def fleet_steps(self) -> int:
        """Env steps of the whole fleet, for schedules: what modules get as batch["t"]. It never goes back.

        In a fleet those of all others that the broker has accepted, and all of this runner's life, discarded ones
        too. Without a fleet it is thought that all `num_workers` runners have lived through as many as this one.
        """
        if self.steps_elsewhere is not None:
            return self.steps_elsewhere + self.totals.env_steps
        return (self._metrics.steps_before + self.totals.env_steps) * max(self.config.num_workers, 1)

    def take_finished_episodes(self) -> list[tuple[float, int]]:
        """(return, length) of each episode delivered to its end since the last call."""
        return self._metrics.take_finished()

    def take_untrained_episodes(self, most: int) -> list[tuple[float, int]]:
        """(return, length) of external episodes that ended and are not to be trained on: the oldest not taken yet."""
        return self._metrics.take_untrained(most)

    def take_over(self, taken: TakenOver) -> None:
        """Have what others took and cut in this runner's totals and metrics. Its worker ships the batch as its own."""
        take_over(taken, self.totals, self._metrics, several_agents=self.config.is_multi_agent)

    def assert_healthy(self) -> None:
        """Raise AssertionError unless construction went through to its end."""
        if not getattr(self, "_healthy", False) or self._stopped:
            raise AssertionError("the runner was not built to its end, or was stopped")

    def _make_parts(self) -> None:
        """Envs and module; where they cannot all be made no env stays open, nor a process of envs."""
        try:
            self.make_env()
            self.make_module()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Close all envs. May be called twice, and on a runner that has none; `make_env` builds them anew."""
        self.callbacks.check_at_rest("stop()")
        self._stopped = True
        if self._sampler is not None:
            self._sampler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def no_module_error() -> ModuleError:
    """What is raised where a policy is asked for and there is none."""
    return ModuleError("this runner has no module (its builder raised NotImplementedError); use random_actions=True")
