"""A run on disk and in Redis: its directory and files, ports, keys, goals, and the policy that it saved."""
