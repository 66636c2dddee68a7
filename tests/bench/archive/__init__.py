"""How fast a cache is exported and imported, beside what the disk can do."""
