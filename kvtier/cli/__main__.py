"""``python -m kvtier.cli``."""

from __future__ import annotations

from kvtier.cli import main

if __name__ == "__main__":
    main()
