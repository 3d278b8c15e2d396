"""The client of a policy server: `from headrace.workers.serving.client import PolicyClient`. No torch, no gymnasium."""

from headrace.workers.serving.client.client import PolicyClient

__all__ = ["PolicyClient"]
