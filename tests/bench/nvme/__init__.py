"""``python -m tests.bench.nvme``: the NVMe tier beside fio and vLLM's own tiering."""
