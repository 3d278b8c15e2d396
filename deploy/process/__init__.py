"""Processes: the supervisor, its children and how they end, and the fork server."""
