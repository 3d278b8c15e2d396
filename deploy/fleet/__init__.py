"""A running fleet: `up`, its roles, groups of workers, and the watchdog and pollers that watch them."""
