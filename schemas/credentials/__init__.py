"""Keys and tokens: their files, who is let in by which, and which are revoked."""
