"""A trained policy for use in other programs, and its export."""
