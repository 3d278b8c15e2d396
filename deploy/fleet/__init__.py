"""A fleet while it runs: `up`, its roles, groups of workers, and those who watch them."""
