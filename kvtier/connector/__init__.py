"""The KV connector of kvtier; independent of any engine."""
