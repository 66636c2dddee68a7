"""Names of tests that the contracts of placements and of admissions share."""

from __future__ import annotations

PURE = "test_it_decides_and_does_nothing_else"
READS_ONLY = "test_copies_and_context_are_read_only"
LIKE_SINGLE_CALLS = "test_batches_are_answered_like_single_chunks"
SAME_ANSWERS = "test_the_same_questions_get_the_same_answers"
