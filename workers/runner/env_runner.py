"""The interface of every env runner: samples, weights, state, metrics; of one agent in each env or of several."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.accounts.logged_metrics import LoggedMetric
from headrace.schemas.accounts.worker_figures import TimePart
from headrace.schemas.basics.printable import brief, one_line
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import CallbackError, ConfigError, HeadraceError, ModuleError, missing_env_error
from headrace.schemas.messages import Tasks
from headrace.workers.annex_parts import part
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.backend import EnvHostsHere
from headrace.workers.envs.driver import external
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.metrics.call_mark import CallMark
from headrace.workers.metrics.runner_metrics import MOST_FINISHED, RunnerMetrics
from headrace.workers.metrics.timers import ENV, SAMPLING, SERIALISE, WAIT
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting_module import ActingModule
from headrace.workers.policy.batch_columns import PolicyColumns
from headrace.workers.policy.module_protocol import build_module, compile_passes
from headrace.workers.randomness.seeds import SeedTree, episode_id_high
from headrace.workers.runner.client_chunks import ClientChunks, take_over
from headrace.workers.runner.policy_names import ModuleIdNames, Selection, Wanted
from headrace.workers.runner.state import RunnerState, Version
from headrace.workers.sampling.cutting import Stamp
from headrace.workers.sampling.external_wait import ExternalWait
from headrace.workers.sampling.poll_loop import Enough, check_size, enough_episodes, enough_steps
from headrace.workers.sampling.sampled_steps import ActionMode, SampledSteps
from headrace.workers.sampling.sampler import Sampler

Batch = TypeVar("Batch", bound=Sequence[EpisodeChunk])
"""The result of one cut."""

_OWN_SETTINGS = ("env_config", "module_config", "env_to_module", "module_to_env")
"""Values that a runner copies, so that later changes by the runner or its caller do not affect the other."""


class EnvRunner(ABC, Generic[Batch]):
    """Steps environments with a policy and gives episode chunks. One thread at a time; usable in a `with` block.

    `totals` is true after every poll. `incarnation` and `run_uid` make episode ids and random numbers unlike those of
    any other runner of the run; with `config.seed` and `run_uid` given, both repeat. While envs on other hosts have no
    host yet, `on_wait` is called from time to time with the address for env hosts. The env call in progress is marked
    in `calls`. Unknown keyword arguments are accepted.
    """

    _names: ModuleIdNames

    def __init__(
        self,
        config: EnvRunnerConfig,
        worker_index: int = 0,
        *,
        incarnation: int = 0,
        run_uid: str = "",
        on_wait: Callable[[str], None] | None = None,
        calls: CallMark | None = None,
        **_: Any,
    ) -> None:
        own = {name: copy.deepcopy(getattr(config, name)) for name in _OWN_SETTINGS}
        self.config = config.model_copy(update=own)
        self.worker_index = worker_index
        self.incarnation = incarnation
        self.totals = RunnerTotals()
        if calls is not None:
            self.totals.calls = calls
        window = math.ceil(config.metrics_num_episodes_for_smoothing / max(config.num_workers, 1))
        self._metrics = RunnerMetrics(window, self.totals)
        self.callbacks = CallbackList(config.callbacks, self._callback_arguments)
        self._seeds = SeedTree(config.seed, worker_index, incarnation, config.num_envs)
        self._id_high = episode_id_high(run_uid, self._seeds.entropy, worker_index, incarnation)
        self._on_wait_for_hosts = on_wait
        self._sampler: Sampler[Any, Any] | None = None
        self._state = RunnerState(
            self._names, lambda: self._sampler, worker_index, self._metrics, self.totals, self.callbacks
        )
        self._tasks_given = 0
        self._stopped = False
        """True once all envs are closed, for good or until a `make_env` that succeeds."""
        self.modules: dict[str, torch.nn.Module | None] = {}
        """Module id -> the policy's module; None where its builder raised NotImplementedError."""
        self.steps_elsewhere: int | None = None
        """Number of known env steps of the fleet that other runners made; None without a fleet."""
        torch.set_num_threads(config.torch_threads)
        self._device = None if config.device == "cpu" else part("open_device")(config.device)
        self._read_policies()
        self._make_parts()

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else f"weights {tuple(self.weights_version)}"
        of = f"{self.config.num_envs} envs of {brief(self.config.env)}"
        return one_line(f"<{type(self).__name__} {self.worker_index}: {of}, {self.totals.stepped:,} steps, {state}>")

    # -- what differs between one agent and several -------------------------------------------------------------------

    @abstractmethod
    def _read_policies(self) -> None:
        """Read the policies of the config. Raises `ConfigError` for a config of the other kind of runner."""

    @abstractmethod
    def _open_steps(self) -> SampledSteps[Any, Any]:
        """Build all envs from the config, for the first time."""

    @abstractmethod
    def _builder_of(self, module_id: str) -> tuple[Any, Mapping[str, Any]]:
        """Return the builder of a module, as in `EnvRunnerConfig.module`, and its keyword arguments."""

    @abstractmethod
    def _cut(self, stamp: Stamp, keep_open: bool) -> Batch:
        """Cut and count the sampled steps. `keep_open`: whole episodes only."""

    @abstractmethod
    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Return module id -> (observation space, action space), as the env has them.

        As in RLlib, "__env_single__" has the spaces of one env, and "__env__" those of all, batched as gymnasium's
        vectors batch them. With several agents these are Dicts by agent id.
        """

    def _env_spaces(self, observation: gym.Space[Any], action: gym.Space[Any]) -> dict[str, tuple[Any, Any]]:
        """Return the spaces that `get_spaces` has in addition to the modules'. The arguments are those of one env."""
        width = self.config.num_envs
        whole = batch_space(observation, width), batch_space(action, width)
        return {"__env__": whole, "__env_single__": (observation, action)}

    def _maps_actions(self, module_id: str) -> bool:
        """Return whether connectors make the env's actions from the module's."""
        return bool(self.config.module_to_env)

    def get_metrics(self) -> dict[str, Any]:
        """Return steps and completed episodes since the last call, and lifetime sums. Omit figures without a value."""
        return self._metrics.report(self._state.version.seq)

    def running_episodes(self) -> list[Any]:
        """Return a view of each open episode, by env, with its age, length and return so far."""
        if self._sampler is None:
            return []
        look, lanes = self._sampler.steps.look, self._sampler.envs.lanes
        return [look(lane, lane.episode) for lane in lanes if lane.episode is not None]

    # -- envs and modules ---------------------------------------------------------------------------------------------

    def make_env(self) -> None:
        """Build all envs again from the config, closing what was there. Open episodes are over.

        Raises `ConfigError`, `UnknownEnvError`, or `EnvError` caused by the env's own error. Then the runner has no
        envs.
        """
        self.callbacks.check_at_rest("make_env()")
        self._stopped = True
        is_remote = self.config.env_placement == "remote"
        with self.totals.timers.budget.spent_on(WAIT if is_remote else ENV):
            if self._sampler is None:
                self._sampler = self._open_sampler()
            else:
                self._sampler.rebuild(self.config)
        self._sampler.use(self.modules, lambda: self.fleet_steps, self._device)
        self._stopped = False

    def _lane_table(self) -> LaneTable:
        self._existing_table = LaneTable(self.config, self.worker_index, self._seeds, self.totals, self.callbacks)
        return self._existing_table

    def _open_sampler(self) -> Sampler[Any, Any]:
        steps, wait = self._open_steps(), None
        if (callers := external(steps.envs)) is not None:
            wait = ExternalWait(self.config.external_fragment_max_age_s, callers, lambda: self.weights_version)
        return Sampler(steps, self.totals, self.callbacks, wait)

    def make_module(self) -> None:
        """Build all modules again from the config. A builder that raises NotImplementedError leaves random actions.

        Raises `ModuleError` for a module that cannot be built or used. Then the runner has no modules.
        """
        self.callbacks.check_at_rest("make_module()")
        policies = self._policies
        self.modules = dict.fromkeys(policies)
        self._existing_sampler.use(self.modules, lambda: self.fleet_steps, self._device)
        self.modules = {module_id: self._build(module_id, policy.spaces) for module_id, policy in policies.items()}
        self._state.note_version(Version())
        self._existing_sampler.use(self.modules, lambda: self.fleet_steps, self._device)

    def _build(self, module_id: str, spaces: Spaces) -> torch.nn.Module | None:
        builder, settings = self._builder_of(module_id)
        try:
            module: torch.nn.Module = build_module(builder, spaces, settings).eval()
        except NotImplementedError:
            return None
        if self.config.module_compile:
            compile_passes(module)
        return module

    def _make_parts(self) -> None:
        """Make envs, if the config has any, and modules. If that fails, close all envs and their processes."""
        if self.config.env is not None or self.config.env_placement == "remote":
            try:
                self.make_env()
                self.make_module()
            except BaseException:
                self.stop()
                raise
        self._healthy = True

    @property
    def _existing_sampler(self) -> Sampler[Any, Any]:
        if self._sampler is None:
            raise missing_env_error()
        return self._sampler

    @property
    def _policies(self) -> Mapping[str, ActingModule]:
        return self._existing_sampler.steps.policies

    @property
    def env(self) -> Any:
        """Env 0 of the vector, or all of a native one; None before `make_env`, and while it waits to be rebuilt."""
        return self._sampler.envs.lanes[0].env if self._sampler is not None else None

    @property
    def num_envs(self) -> int:
        """Number of envs that are stepped together."""
        return self.config.num_envs

    @property
    def envs_lost(self) -> int:
        """Number of envs that are down: they wait to be rebuilt, or for a host."""
        lanes = self._sampler.envs.lanes if self._sampler is not None else []
        return sum(lane.env is None for lane in lanes)

    @property
    def env_hosts(self) -> EnvHostsHere | None:
        """Number of env hosts that are connected, and how many it takes for all envs; None for envs elsewhere."""
        return self._sampler.envs.env_hosts if self._sampler is not None else None

    @property
    def module_spaces(self) -> dict[str, Spaces]:
        """Module id -> the spaces of its chunks, as data, in one order in every process of a fleet."""
        return {module_id: policy.spaces for module_id, policy in self._policies.items()}

    def state_dicts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that `set_weights` writes, by module and name; empty where a module has none."""
        modules = {module_id: policy.module for module_id, policy in self._policies.items()}
        states = {module_id: {} if module is None else module.state_dict() for module_id, module in modules.items()}
        return states if all(states.values()) else {}

    def policy_columns(self) -> dict[str, PolicyColumns]:
        """Return by module the columns of batches of external envs here, to check the batches that clients cut.

        Raises `ModuleError` without a module.
        """
        self._check_can_act()
        return {
            module_id: PolicyColumns.of(
                policy.module,
                policy.spaces,
                policy.env_spaces,
                self.config,
                maps=self._maps_actions(module_id),
                device=self._device,
            )
            for module_id, policy in self._policies.items()
        }

    def call_before_rebuilds(self, on_rebuild: Callable[[], None]) -> None:
        """Have `on_rebuild` called before each rebuild of an env, which may take as long as the env likes."""
        self._existing_sampler.envs.on_rebuild = on_rebuild

    # -- sampling -----------------------------------------------------------------------------------------------------

    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
        end_markers: bool = False,
    ) -> Batch | list[EpisodeChunk]:
        """Return chunks of about `num_timesteps` env steps, or `num_episodes` whole episodes; finished ones come first.

        `num_timesteps` n polls all envs ceil(n / num_envs) times and continues the episodes of the call before. Without
        failures it returns n to n + num_envs - 1 steps. Where ready envs step first, the total is the same, but envs
        differ in how many steps they take. `num_episodes` m resets all envs first and returns m to m + num_envs - 1
        episodes; other episodes that it began are dropped. External envs cannot be reset: their episodes continue and
        stay open. Without a size, `config.batch_mode` decides.

        With `end_markers`, an ABORTED chunk without steps comes last for each episode that will never finish, if a part
        of it was returned earlier. While all envs are down the call waits, for as long as their budget of failures
        lasts.

        Raises `SampleSizeError` for a size that makes no sense, `EnvRestartBudgetError` when an env failed too often,
        `EnvError` when no client drives external envs, `ModuleError` when the policy fails,
        `HeadraceError` after `stop`, also within most callbacks, and `CallbackError` when
        on_sample_end does; it has the `samples`.
        """
        self.callbacks.check_at_rest("sample()")
        check_size(num_timesteps, num_episodes)
        if num_timesteps == 0 or num_episodes == 0:
            return []
        length, width = self.config.rollout_fragment_length, self.config.num_envs
        if num_timesteps is None and num_episodes is None:
            whole = self.config.batch_mode == "complete_episodes"
            num_timesteps, num_episodes = (None, width) if whole else (length * width, None)
        mode = ActionMode(self.config.explore if explore is None else explore, random_actions)
        sampler = self._existing_sampler
        if num_episodes is None:
            steps = num_timesteps or 0
            self._begin(mode, -(-steps // width), force_reset)
            self._poll_until(self._enough_steps(steps))
        else:
            self._begin(mode, length, force_reset or sampler.resets_envs)
            self._poll_until(enough_episodes(num_episodes, sampler), stop_at_episodes=num_episodes)
            if sampler.resets_envs:
                sampler.abandon(Discard.RESET)
        keep_open = num_episodes is not None and not sampler.resets_envs
        cut = self._deliver(keep_open, end_markers)
        samples: Any = cut.finished_first() if isinstance(cut, ChunkBatch) else cut
        return self._end_sample(samples)

    def sample_fragment(
        self,
        on_poll: Callable[[], None] | None = None,
        random_actions: bool = False,
        on_wait: Callable[[], None] | None = None,
        most_steps: int | None = None,
    ) -> Batch:
        """Return the fragment that a worker ships: `rollout_fragment_length` polls, then a cut of all open episodes.

        With `most_steps` the cut comes as soon as this many steps were taken, if episodes may be cut.

        With batch_mode "complete_episodes": polls until `num_envs` episodes have finished, which are delivered; the
        others stay open. With external envs it returns what arrived within `external_fragment_max_age_s`.

        Calls `on_poll` after every poll. Calls `on_wait` (default: `on_poll`) from time to time while it waits for
        remote or failed envs, and `on_wait` alone between resets of inline envs, and between slow steps. Either may
        raise to interrupt the call, between two inline envs with the end of the poll. Then the next call continues, or
        `cut_fragment` returns the steps so far.
        A batch carries the updates that the connectors of its module learnt; `take_connector_update` does not return
        them again.
        """
        self.callbacks.check_at_rest("sample_fragment()")
        whole = self.config.batch_mode == "complete_episodes"
        length, width = self.config.rollout_fragment_length, self.config.num_envs
        self.totals.calls.on_wait = on_wait
        self._begin(ActionMode(self.config.explore, random_actions), length, False, on_wait or on_poll)
        sampler = self._existing_sampler
        enough = enough_episodes(width, sampler) if whole else self._enough_steps(length * width)
        goal = None if most_steps is None or whole else self.totals.stepped + most_steps
        self_driven = not sampler.resets_envs
        # A batch names one learner epoch.
        self._poll_until(
            lambda: (
                enough()
                or (goal is not None and self.totals.stepped >= goal)
                or self._state.waiting is not None
                or (self_driven and sampler.is_overdue)
            ),
            on_poll=on_poll,
            on_wait=on_wait,
        )
        return self.cut_fragment()

    def cut_fragment(self) -> Batch:
        """Return the steps of an interrupted `sample_fragment`, without steps under way."""
        whole = self.config.batch_mode == "complete_episodes"
        return self._end_sample(self._attach_updates(self._deliver(keep_open=whole)))

    def discard_open(self, reason: Discard) -> Batch:
        """End sampling. Return the chunks finished since the last cut, and end markers for episodes delivered in part.

        Unfinished steps are lost under `reason`. The next sampling resets all envs.
        """
        self.callbacks.check_at_rest("discard_open()")
        self._existing_sampler.finish(reason)
        return self._attach_updates(self._deliver(keep_open=False))

    def _check_can_act(self) -> None:
        """Raise `ModuleError` if there is no policy to act with."""
        if any(policy.module is None for policy in self._policies.values()):
            raise ModuleError(
                "this runner has no module (its builder raised NotImplementedError); use random_actions=True"
            )

    def _begin(
        self, mode: ActionMode, capacity: int, force_reset: bool, on_wait: Callable[[], None] | None = None
    ) -> None:
        sampler = self._existing_sampler
        if self._stopped:
            raise HeadraceError("this runner was stopped and has closed its envs; make_env() rebuilds them")
        if not mode.random_actions:
            self._check_can_act()
        if sampler.needs_rebuild:
            self.make_env()
        self.totals.timers.begin_sample()
        with self.totals.timers.budget.spent_on(SAMPLING):
            sampler.begin(mode, capacity, force_reset=force_reset, on_wait=on_wait)

    def _poll_until(
        self,
        enough: Enough,
        *,
        on_poll: Callable[[], None] | None = None,
        on_wait: Callable[[], None] | None = None,
        stop_at_episodes: int | None = None,
    ) -> None:
        """Call `on_poll` after each poll, and `on_wait` (default: `on_poll`) in waits for envs."""
        sampler, on_wait = self._existing_sampler, on_wait or on_poll
        with self.totals.timers.budget.spent_on(SAMPLING):
            try:
                while not enough():
                    sampler.poll(self._state.version.seq, on_wait=on_wait, stop_at_episodes=stop_at_episodes)
                    if on_poll is not None:
                        on_poll()
            except ModuleError as error:
                epoch, seq = self.weights_version
                if epoch:
                    error.args = (f"with weights version {seq} of learner epoch {epoch}, {error}",)
                raise

    def _enough_steps(self, steps: int) -> Enough:
        of_agents = self.config.count_steps_by == "agent_steps"
        return enough_steps(steps, self._existing_sampler, self.totals, of_agents=of_agents)

    def _deliver(self, keep_open: bool, end_markers: bool = True) -> Batch:
        """Cut, and then apply the weights that waited for the cut."""
        sampler, state = self._existing_sampler, self._state
        with self.totals.timers.budget.spent_on(SERIALISE):
            if state.waiting is not None and (keep_open or sampler.steps.has_pending):
                sampler.abandon(Discard.RESET)  # one batch cannot hold steps of two epochs
                keep_open = False
            stamp = Stamp(
                self._id_high,
                sampler.steps.mode.flags,
                self.worker_index,
                self.incarnation,
                state.version.learner_epoch,
                state.digest_of,
                self.config.episode_lookback_horizon,
            )
            if not end_markers:
                sampler.steps.drop_markers()
            batch = self._cut(stamp, keep_open)
            try:
                state.apply_waiting()
            except CallbackError as error:
                error.samples = batch
                raise
        return batch

    def _attach_updates(self, batch: Batch) -> Batch:
        attached: Batch = self._names.attach_update(self._policies, batch)
        return attached

    def _end_sample(self, samples: Batch) -> Batch:
        self.totals.timers.end_sample()
        try:
            self.callbacks.call("on_sample_end", samples=samples)
        except CallbackError as error:
            error.samples = samples
            raise
        return samples

    # -- weights and state --------------------------------------------------------------------------------------------

    @property
    def weights_version(self) -> tuple[int, int]:
        """(learner_epoch, seq) of the weights in use; (0, 0) are those the module was built with."""
        return self._state.weights_version

    def set_weights(self, state: Mapping[str, Any], seq: int, learner_epoch: int = 0, digest: str = "") -> None:
        """Act with `state`, arrays or torch tensors, from the next poll on.

        Raises `ModuleError`, changing nothing, if it does not fit.

        Arrays whose names begin with "connectors/" are connector state of the same version: taken together with the
        weights, or not at all, as `merge_connector_updates` gives them; `ConnectorError` if they do not fit.

        Weights of another learner epoch take effect after the next cut, because a batch names one epoch.
        `weights_version` always names the weights in use.
        """
        self._state.set_weights(state, Version(learner_epoch, seq, digest))

    def set_tasks(self, told: Tasks | Mapping[str, Any] | Sequence[Any] | None, *, group: int = 0) -> None:
        """Give each env a task at its next reset, and stamp its episode with it. Arguments as `TaskPublisher.publish`.

        A message counts as it is. An env with `set_task(values)` gets it before its reset, others as `options`.
        Caution: once tasks are taken away, an env with `set_task` keeps its last one. A task whose resets fail three
        times in a row is left out here. `TaskDraws` says which episode gets which task. `get_state` does not have the
        tasks: set them again after `set_state`. Draws then go on; groups begin again with the first one.

        A vector gets the values as options of its `reset`, beside the `reset_mask` of the envs that have this task.

        Raises `EncodeError` for what is no task, and `ConfigError` for tasks that these envs cannot take, whose
        episodes have none then.
        """
        if not isinstance(told, Tasks):
            told = Tasks.of(told, (0, self._tasks_given + 1), group)
            self._tasks_given += 1
        draws = self._existing_table.tasks
        why = self._existing_sampler.envs.why_no_tasks(told.group) if told.tasks else ""
        draws.set(None if why else told)
        draws.refused = why or draws.refused
        if why:
            raise ConfigError(why, key="env")

    @property
    def tasks_refused(self) -> str:
        """The present tasks that the envs refuse, with the reasons, in words; "" if they take all."""
        return self._existing_table.tasks.refused if self._sampler is not None else ""

    def get_state(self, components: Wanted = None, not_components: Wanted = None) -> dict[str, Any]:
        """Return this runner's state as plain values and arrays. `set_state` of another runner continues from it.

        | component | what it is |
        |---|---|
        | "rl_module" | weights as arrays by name, with "weights_seq_no", "learner_epoch" and "weights_digest" |
        | "env_to_module", "module_to_env" | state of the connectors |
        | "random_streams" | seeds, numbers and episode ids to come |

        Lifetime counters are always included. "rl_module/p0" is a part: the state of module p0. A runner of one module
        calls it "default_policy". There "env_to_module/0.MeanStd" is a single connector's state. Components that the
        runner does not have are left out.

        Raises `StateError` for an unknown component, or a part that is not there.
        """
        return self._state.get(Selection(components, not_components))

    def set_state(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        """Take over the parts of `state`; weights only if (learner_epoch, weights_seq_no) is newer, or `force`.

        Connector state that comes with weights is taken or left together with them. It replaces all that connectors
        have learnt here, also what `take_connector_update` has not returned yet. "random_streams" are taken only
        with the same worker_index, so that no two workers get the same episodes. This runner then abandons its open
        episodes. The other runner's open episodes are not restored.
        Raises `StateError`, `ModuleError` or `ConnectorError` for what does not fit.
        """
        self._state.set(state, force=force)

    def get_counters(self) -> dict[str, Any]:
        """Return the lifetime counters, which every state includes."""
        return self._metrics.read_counters()

    def time_by_part(self) -> dict[TimePart, float]:
        """Return the seconds of this runner's life by part of its work. They sum to the time since it was made."""
        return self.totals.timers.budget.seconds()

    def get_logged_metrics(self) -> dict[str, LoggedMetric]:
        """Return what callbacks have logged so far, for a fleet to merge. `get_metrics` is not affected."""
        return self._metrics.logger.cumulative()

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Continue counting from `counters`. Raises `StateError` for a value that is not a counter."""
        self._metrics.write_counters(counters)

    def take_connector_update(self) -> dict[str, Any]:
        """Return what connectors have learnt since the last call, for `merge_connector_updates`.

        Of several modules: by module id.
        """
        return self._names.take_update(self._policies)

    def merge_connector_updates(self, state: Mapping[str, Any], updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the `updates` of all runners into `state`, the previous result or {}, and return it. Changes no runner.

        Pass the result, together with new weights in one mapping, to `set_weights` of every runner. With several
        modules both are by module id.
        """
        return self._names.merge(self._policies, state, updates)

    def freeze_connectors(self) -> None:
        """Stop connectors from learning, for example to evaluate a trained policy. `make_env` undoes it."""
        for policy in self._policies.values():
            policy.connectors.freeze()

    def try_render_at(self, index: int = 0) -> NDArray[np.uint8] | None:
        """Return what env `index` shows, rgb uint8 (height, width, 3); None if it gives no rgb_array, or is down."""
        return self._existing_sampler.envs.try_render_at(index)

    # -- what else a caller may ask -----------------------------------------------------------------------------------

    def _callback_arguments(self) -> dict[str, Any]:
        return {"env_runner": self, "metrics_logger": self._metrics.logger, "rl_module": self._rl_module}

    @property
    def _rl_module(self) -> Any:
        """Return the modules that callbacks get as `rl_module`."""
        return self.modules or None

    @property
    def fleet_steps(self) -> int:
        """Env steps of the whole fleet, for schedules: modules get it as batch["t"]. It never decreases.

        In a fleet it counts the steps of other workers that the broker has accepted, and all steps of this runner's
        life, discarded ones too. Without a fleet, all `num_workers` runners are assumed to have made as many steps as
        this one.
        """
        if self.steps_elsewhere is not None:
            return self.steps_elsewhere + self.totals.env_steps
        return (self._metrics.steps_before + self.totals.env_steps) * max(self.config.num_workers, 1)

    def take_finished_episodes(self, most: int = MOST_FINISHED) -> list[tuple[float, int]]:
        """Return (return, length) of each episode delivered to its end since the last call, of `most` at the most."""
        return self._metrics.take_finished(most)

    def take_untrained_episodes(self, most: int) -> list[tuple[float, int]]:
        """Return (return, length) of ended external episodes that are excluded from training, the oldest first."""
        return self._metrics.take_untrained(most)

    def take_over(self, taken: ClientChunks) -> None:
        """Count the chunks that clients cut in this runner's totals and metrics. Its worker ships the batch."""
        take_over(taken, self.totals, self._metrics, several_agents=self.config.is_multi_agent)

    def assert_healthy(self) -> None:
        """Raise AssertionError unless construction is complete and the runner was not stopped."""
        if not getattr(self, "_healthy", False) or self._stopped:
            raise AssertionError("the runner was not built completely, or was stopped")

    def stop(self) -> None:
        """Close all envs. May be called twice, and on a runner that has none; `make_env` builds them again."""
        self.callbacks.check_at_rest("stop()")
        self._stopped = True
        if self._sampler is not None:
            self._sampler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
