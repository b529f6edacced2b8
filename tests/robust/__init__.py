"""Whole-program checks: broken streams, mutated files, answers that must agree, and hostile servers."""
