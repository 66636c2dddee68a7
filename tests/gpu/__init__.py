"""``python -m tests.gpu``: correctness and figures on a machine with a GPU."""
