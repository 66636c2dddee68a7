"""How fast traces are replayed."""
