"""Real vLLM engines on the CPU, with and without kvtier, compared token for token.

``nox -s demo`` runs this package. The integration tests and benchmarks share its modules:

* ``model`` writes a small model whose answers depend on every block of its context;
* ``scenario`` holds what one engine runs, and what it reports;
* ``engine`` is the program that runs one engine, in a process of its own;
* ``runner`` starts that program and talks to it.
"""
