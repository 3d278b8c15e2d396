"""`headrace doctor`: checks whether this machine can run a fleet, and says what to do if not."""
