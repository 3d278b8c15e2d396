"""Sampling: polls of the envs, the buffers that keep their steps, and the cuts that make chunks of them."""
