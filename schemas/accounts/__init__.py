"""Accounts: the books, the recorder that outlives its worker, the figures of a worker, and the names in Redis."""
