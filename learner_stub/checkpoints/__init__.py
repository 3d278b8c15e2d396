"""Checkpoints of learners."""
