"""The device mesh and the one table that maps logical axis names to it."""
