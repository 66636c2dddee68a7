"""Contract suites and verified fakes for those who write tiers and policies."""

from __future__ import annotations
