"""A stop in a debugger before the call from which the worker's env did not return: it hung, or ended its process."""

from __future__ import annotations

import pdb
from collections.abc import Callable
from typing import Any

from headrace.deploy.terminal.std_streams import say
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator
from headrace.workers.reruns.failure_files import FailureFacts


def stopping_before(creator: EnvCreator, facts: FailureFacts, on_stop: Callable[[], object]) -> EnvCreator:
    """Return a creator of the failure's env, which stops in a debugger before the failure's call.

    It stops in front of the innermost env, within its wrappers. `on_stop` is called first.
    """

    def stopped(call: Callable[..., Any]) -> Callable[..., Any]:
        def stop(*args: Any, **kwargs: Any) -> Any:
            on_stop()
            say(f"stops before {facts.at}, from which the worker's env did not return ({facts.error}); s steps into it")
            pdb.Pdb(nosigint=True).set_trace()
            return call(*args, **kwargs)

        return stop

    def create(context: EnvContext) -> Any:
        if facts.at == "construction":
            return stopped(creator)(context)
        env = creator(context)
        name = "step" if facts.steps else "reset"
        own, inner, left = getattr(env, name), getattr(env, "unwrapped", env), facts.steps or 1

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left:
                return own(*args, **kwargs)
            if inner is env:
                return stopped(own)(*args, **kwargs)
            setattr(inner, name, stopped(getattr(inner, name)))
            return own(*args, **kwargs)

        setattr(env, name, counted)
        return env

    return create
