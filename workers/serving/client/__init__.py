"""The client of a policy server, `PolicyClient`. It needs neither torch nor gymnasium."""

from headrace.workers.serving.client.client import PolicyClient

__all__ = ["PolicyClient"]
