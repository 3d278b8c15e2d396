"""The `headrace` command, which starts, supervises, drains and inspects fleets; and trained policies for programs."""
