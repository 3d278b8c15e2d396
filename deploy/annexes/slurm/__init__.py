"""`headrace slurm`: a fleet as jobs of a Slurm cluster: one head job, and arrays of workers and env hosts."""
