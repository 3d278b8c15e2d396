"""External envs, which drive themselves: they ask for actions and report the results."""

from headrace.workers.external.agent_episodes import ExternalAgentEpisodes
from headrace.workers.external.calls import Answer
from headrace.workers.external.env import ExternalEnv, ExternalMultiAgentEnv
from headrace.workers.external.solo_episodes import ExternalEpisodes

__all__ = ["Answer", "ExternalAgentEpisodes", "ExternalEnv", "ExternalEpisodes", "ExternalMultiAgentEnv"]
