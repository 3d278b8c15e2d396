"""Brokers, workers and learners of one delivery path."""
