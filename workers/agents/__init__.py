"""Many agents in one env: each agent's chunks are its own, each module acts once a poll for all agents it plays."""
