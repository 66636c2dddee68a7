"""kvtier as a KV connector, for any engine: nothing here imports one."""
