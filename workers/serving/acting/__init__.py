"""A client of a policy server that acts by itself, `ActingClient`. It needs torch."""

from headrace.workers.serving.acting.client import ActingClient

__all__ = ["ActingClient"]
