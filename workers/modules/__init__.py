"""Policies: the protocol that a module follows, how one is found, and the default actor-critic."""

from headrace.workers.modules.actor_critic import ActorCritic, actor_critic
from headrace.workers.modules.protocol import PolicyModule

__all__ = ["ActorCritic", "PolicyModule", "actor_critic"]
