"""The policy: one owner of modules, connectors, memory and noise, that chooses actions."""
