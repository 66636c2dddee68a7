"""A KV connector for any engine: a scheduler half and a worker half."""
