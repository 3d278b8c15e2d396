"""Connectors: small pieces between env and module, each working on whole batches of rows.

    env ── observations ──> env_to_module[0] ──> ... ──> env_to_module[-1] ──> module   (and into the chunks)
    env <── actions_for_env <── module_to_env[-1] <── ... <── module_to_env[0] <── actions ──┘

Each observation passes env_to_module once, when it arrives. It passes under random actions too, so that all chunks have
the same observations. Random actions are drawn from the env's own space and skip module_to_env, unless module_to_env
gives the module another action space.

With several agents, each module has its own pieces, and a lane is one agent in one env. An observation passes when it
arrives, together with the agent's own last action and all rewards since. An observation that never arrives does not
pass. Random actions obey the action masks in the env's own observations, unless the module has other choices.

`connector.py` defines a connector, `pipeline.py` runs a list of them, `vector_connectors.py` runs both lists of a
vector.
"""

from headrace.workers.connectors.additions import AgentOneHot, PreviousActionReward, TimeOneHot
from headrace.workers.connectors.connector import Connector, Rows
from headrace.workers.connectors.mean_std import MeanStd
from headrace.workers.connectors.pieces import ClipActions, FlattenObservations, FrameStack, UnsquashActions

__all__ = [
    "AgentOneHot",
    "ClipActions",
    "Connector",
    "FlattenObservations",
    "FrameStack",
    "MeanStd",
    "PreviousActionReward",
    "Rows",
    "TimeOneHot",
    "UnsquashActions",
]
