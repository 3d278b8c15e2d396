"""What a run is made of and found by: its directory, ports, keys, Redis, goals, and the policy that it saved."""
