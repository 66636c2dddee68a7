"""What kvtier asks of the operating system: threads for I/O, memory, limits, ownership."""
