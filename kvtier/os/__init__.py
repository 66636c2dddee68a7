"""Operating system: threads for I/O, memory, limits, file ownership."""
