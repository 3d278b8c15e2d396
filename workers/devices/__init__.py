"""A GPU on which modules act: one copy there and one back for each pass."""
