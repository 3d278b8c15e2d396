"""The callbacks of a runner: the events, the arguments of each, and the order of calls.

    event                    when                                                          arguments of its own
    on_environment_created   an env was built, also after each rebuild                     env, env_context
    on_episode_created       before `env.reset`                                            ┐
    on_episode_start         after `env.reset`, before the first action                    │ episode, env,
    on_episode_step          after each step, the last one too                             │ env_index
    on_episode_end           after the last step's on_episode_step                         ┘
    on_episode_aborted       an episode that was created will never finish                 episode, reason, env_index
    on_env_failed            an env raised or broke its contract; None without an episode  exc, episode, env_index
    on_sample_end            once per sample or fragment                                   samples
    on_weights_applied       other weights act from now on: (learner_epoch, seq)           version
    on_chunk_sent            a worker process has handed over the chunk's batch            chunk

All arguments are passed by keyword. Each event also has the common ones: `env_runner`, `metrics_logger` and `rl_module`
(None before it is built; with several policies, a mapping by id). `episode` is an `EpisodeView` or a
`MultiAgentEpisodeView`. A callback gets the arguments that it names, or all if it has **kwargs. Objects are called
first, in the order of the config, then functions.

Every callback may read and set the runner's metrics, state and weights. Only on_sample_end and on_chunk_sent may move
its envs (`sample`, `make_env`, `stop` and similar calls). In other events such calls raise `HeadraceError`.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import CallbackError, ConfigError, HeadraceError
from headrace.schemas.settings.plugins import load_object

logger = logging.getLogger(__name__)

Function = Callable[..., Any]
CallbackSpec = str | type | Mapping[str, Any] | Any
"""A class (instantiated once per runner), an object, {event: function or list of them}, or "package.module:name"."""

_COMMON = ("env_runner", "metrics_logger", "rl_module")
_EPISODE = ("episode", "env", "env_index")
EVENTS: dict[str, tuple[str, ...]] = {
    "on_environment_created": ("env", "env_context"),
    "on_episode_created": _EPISODE,
    "on_episode_start": _EPISODE,
    "on_episode_step": _EPISODE,
    "on_episode_end": _EPISODE,
    "on_episode_aborted": ("episode", "reason", "env_index"),
    "on_env_failed": ("exc", "episode", "env_index"),
    "on_sample_end": ("samples",),
    "on_weights_applied": ("version",),
    "on_chunk_sent": ("chunk",),
}
"""Event -> its arguments, without the common ones."""

_AT_REST = (None, "on_sample_end", "on_chunk_sent")
"""Events in which no step is half done; None: no event."""


class RunnerCallback:
    """Optional base class of callback objects: override what you need. Methods that are not overridden cost nothing."""

    def on_environment_created(self, *_: Any, **kwargs: Any) -> None:
        """Handle a new `env` (unwrapped), built from `env_context`."""

    def on_episode_created(self, *_: Any, **kwargs: Any) -> None:
        """Handle an `episode` that is about to begin with a reset of `env`."""

    def on_episode_start(self, *_: Any, **kwargs: Any) -> None:
        """Handle the reset of `env`: `episode.observation` is the first one."""

    def on_episode_step(self, *_: Any, **kwargs: Any) -> None:
        """Handle one step of `env`."""

    def on_episode_end(self, *_: Any, **kwargs: Any) -> None:
        """Handle an `episode` that terminated or was truncated, as `episode.end` says."""

    def on_episode_aborted(self, *_: Any, **kwargs: Any) -> None:
        """Handle an `episode` that will never finish; `reason` is a value of `schemas.accounts.ledger.Discard`."""

    def on_env_failed(self, *_: Any, **kwargs: Any) -> None:
        """Handle the failure `exc` of the env at `env_index`, which is about to be rebuilt; `episode` may be None."""

    def on_sample_end(self, *_: Any, **kwargs: Any) -> None:
        """Handle new `samples`."""

    def on_weights_applied(self, *_: Any, **kwargs: Any) -> None:
        """Handle weights of `version`, which act from now on."""

    def on_chunk_sent(self, *_: Any, **kwargs: Any) -> None:
        """Handle a `chunk` that is on its way to the learner."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """One function of one event, and the names of the arguments it takes; None is all."""

    name: str
    function: Function
    takes: frozenset[str] | None

    def call(self, event: str, arguments: Mapping[str, Any]) -> None:
        takes = self.takes
        given = arguments if takes is None else {key: value for key, value in arguments.items() if key in takes}
        try:
            self.function(**given)
        except BaseException as error:
            raise_stop(error)
            raise CallbackError(event, self.name, error) from error


class CallbackList:
    """All callbacks of one runner. `common()` returns the arguments that every event has."""

    def __init__(self, specs: Iterable[CallbackSpec], common: Callable[[], dict[str, Any]]) -> None:
        loaded = [load_object(spec, "callbacks") if isinstance(spec, str) else spec for spec in specs]
        self._common = common
        self._telling: str | None = None
        self._bound: dict[str, list[_Bound]] = {}
        for spec in loaded:
            if not isinstance(spec, Mapping):
                self._add_object(spec)
        for spec in loaded:
            if isinstance(spec, Mapping):
                self._add_functions(spec)

    def wants(self, event: str) -> bool:
        """Return whether any callback handles `event`."""
        return event in self._bound

    def call(self, event: str, **arguments: Any) -> None:
        """Call all callbacks of `event`. Raises `CallbackError` for the first that raises, and skips those after it."""
        bound = self._bound.get(event)
        if bound:
            arguments.update(self._common())
            outer, self._telling = self._telling, event
            try:
                for callback in bound:
                    callback.call(event, arguments)
            finally:
                self._telling = outer

    def tell(self, event: str, **arguments: Any) -> None:
        """Call all callbacks of an `event` about something that is already over. Errors are logged, not raised."""
        if event not in self._bound:
            return
        arguments.update(self._common())
        outer, self._telling = self._telling, event
        for callback in self._bound[event]:
            try:
                callback.call(event, arguments)
            except CallbackError as error:
                logger.error("%s; going on, because the episode is already over", error, exc_info=error.__cause__)
        self._telling = outer

    def check_at_rest(self, call: str) -> None:
        """Raise `HeadraceError` if `call`, which moves envs, comes from a callback during a step."""
        if self._telling not in _AT_REST:
            raise HeadraceError(
                f"{call} cannot be called in {self._telling}, in the midst of what the runner does; call it in "
                "on_sample_end, or after sample()"
            )

    def _add_object(self, spec: Any) -> None:
        name = spec.__qualname__ if inspect.isclass(spec) else type(spec).__qualname__
        try:
            target = spec() if inspect.isclass(spec) else spec
        except BaseException as error:
            raise_stop(error)
            raise CallbackError("__init__", name, error) from error
        methods = list(_methods(target))
        if not methods and not isinstance(target, RunnerCallback):
            raise ConfigError(f"{target!r:.80} has no method of an event; events are {', '.join(EVENTS)}", key=_KEY)
        for event, method in methods:
            self._add(event, f"{name}.{event}", method)

    def _add_functions(self, functions: Mapping[str, Any]) -> None:
        for event, given in functions.items():
            if event not in EVENTS:
                near = difflib.get_close_matches(str(event), EVENTS, n=1, cutoff=0.0)
                raise ConfigError(f"there is no event {event!r}; the nearest is {near[0]!r}", key=_KEY)
            for item in given if isinstance(given, list | tuple) else [given]:
                function = load_object(item, "callbacks") if isinstance(item, str) else item
                if not callable(function):
                    raise ConfigError(f"{event} should be a function or a list of them, got {item!r:.80}", key=_KEY)
                self._add(event, getattr(function, "__qualname__", repr(function)), function)

    def _add(self, event: str, name: str, function: Function) -> None:
        bound = _Bound(name, function, _arguments(event, name, function))
        self._bound.setdefault(event, []).append(bound)


_KEY = "callbacks"


def _methods(target: Any) -> Iterator[tuple[str, Function]]:
    """Yield the event methods that `target` defines, without those that it inherits from `RunnerCallback`."""
    for event in EVENTS:
        method = getattr(target, event, None)
        if callable(method) and getattr(method, "__func__", None) is not getattr(RunnerCallback, event):
            yield event, method


def _arguments(event: str, name: str, function: Function) -> frozenset[str] | None:
    """Return which arguments `function` takes; None for all.

    Raises `ConfigError` if it needs an argument that the event does not have.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    offered = (*_COMMON, *EVENTS[event])
    for p in parameters:
        needed = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if needed and (p.kind is p.POSITIONAL_ONLY or p.name not in offered):
            raise ConfigError(f"{name} asks for {p.name!r}; {event} gives, by keyword, {', '.join(offered)}", key=_KEY)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.name in offered)
