"""Vectors that step all their envs themselves: gymnasium's own kinds, and others with gymnasium's interface."""
