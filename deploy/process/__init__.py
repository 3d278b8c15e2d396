"""One process and who looks after it: the supervisor, its children and how they end, and the fork server."""
