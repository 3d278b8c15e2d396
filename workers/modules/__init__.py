"""Policies: the module protocol, the default actor-critic, the recurrent one, and DQN's."""

from headrace.workers.modules.actor_critic import ActorCritic, actor_critic
from headrace.workers.modules.lstm_actor_critic import LstmActorCritic, lstm_actor_critic
from headrace.workers.modules.protocol import PolicyModule, RecurrentModule
from headrace.workers.modules.q_network import QNetwork, q_network
from headrace.workers.modules.recurrent import sequences

__all__ = [
    "ActorCritic",
    "LstmActorCritic",
    "PolicyModule",
    "QNetwork",
    "RecurrentModule",
    "actor_critic",
    "lstm_actor_critic",
    "q_network",
    "sequences",
]
