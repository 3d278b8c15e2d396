"""The Redis client: connection, users and their commands, scripts, and values that are read as claims."""
