"""Connectors: small pieces between env and module, each working on whole batches of rows.

    env ── observations ──> env_to_module[0] ──> ... ──> env_to_module[-1] ──> module   (and into the chunks)
    env <── actions_for_env <── module_to_env[-1] <── ... <── module_to_env[0] <── actions ──┘

Each observation passes once, when it arrives, also under random actions, so that all chunks are alike. Random actions
are drawn from the env's own space and pass nothing, unless module_to_env gives the module another action space.

Where agents are several, each module has pieces of its own, whose lanes are its agents in their envs. An observation
passes when it arrives with the agent's own last action and all rewards since; one that never arrives passes nothing.
Random actions heed the action masks in the env's own observations, unless the module has another action space.

`connector.py` says what one is, `pipeline.py` runs a list of them, `vector_connectors.py` both lists for a vector.
"""

from headrace.workers.connectors.action_pieces import ClipActions, UnsquashActions
from headrace.workers.connectors.additions import AgentOneHot, PreviousActionReward, TimeOneHot
from headrace.workers.connectors.connector import Connector, Rows
from headrace.workers.connectors.flatten import FlattenObservations
from headrace.workers.connectors.frame_stack import FrameStack
from headrace.workers.connectors.mean_std import MeanStd

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
