"""Env runners over small envs, and what is asked of them."""
