"""A client of a policy server that acts by itself: `from headrace.workers.acting_client import ActingClient`."""

from headrace.workers.acting_client.client import ActingClient

__all__ = ["ActingClient"]
