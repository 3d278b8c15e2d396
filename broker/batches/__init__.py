"""Batches that the broker is responsible for: their sources, order, limits and drops."""
