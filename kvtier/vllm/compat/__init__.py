"""What vLLM's configuration says of an engine, in kvtier's terms."""
