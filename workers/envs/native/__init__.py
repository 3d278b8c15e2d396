"""Vectors that step all their envs themselves: gymnasium's own kinds, and every other that is one of gymnasium's."""
