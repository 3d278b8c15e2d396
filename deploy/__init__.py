"""The `headrace` command: it starts, supervises, drains and inspects fleets."""
