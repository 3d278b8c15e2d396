"""Sampler workers for reinforcement learning behind a message broker.

- `headrace.workers`: env runners, on their own or as workers of a fleet.
- `headrace.learner_stub`: the stream of episode chunks and the publisher of weights, for a learner.
- `headrace.deploy`: the `headrace` command.
- `headrace.broker`, `headrace.schemas`: the broker, and what all parts share.

Importing this package imports none of them. They are folders at the root of the repository, and an installation puts
them below this package.
"""

__version__: str
"""The version, as in `pip show headrace`, read when it is first asked for."""


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # takes as long as all else that a light process imports

    return version("headrace")
