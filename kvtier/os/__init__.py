"""Operating system helpers: I/O threads, memory, limits and file ownership."""
