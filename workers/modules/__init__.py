"""Policies: the module protocol, the default actor-critic and the recurrent one."""

from headrace.workers.modules.actor_critic import ActorCritic, actor_critic
from headrace.workers.modules.lstm_actor_critic import LstmActorCritic, lstm_actor_critic
from headrace.workers.modules.protocol import PolicyModule, RecurrentModule
from headrace.workers.modules.recurrent import sequences

__all__ = [
    "ActorCritic",
    "LstmActorCritic",
    "PolicyModule",
    "RecurrentModule",
    "actor_critic",
    "lstm_actor_critic",
    "sequences",
]
