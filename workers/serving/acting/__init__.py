"""A client of a policy server that acts by itself: `from headrace.workers.serving.acting import ActingClient`."""

from headrace.workers.serving.acting.client import ActingClient

__all__ = ["ActingClient"]
