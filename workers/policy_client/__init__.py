"""The client of a policy server: `from headrace.workers.policy_client import PolicyClient`. No torch, no gymnasium."""

from headrace.workers.policy_client.client import PolicyClient

__all__ = ["PolicyClient"]
