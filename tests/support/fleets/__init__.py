"""Fleets, env hosts and programs that run as processes of their own."""
