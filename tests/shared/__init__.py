"""Counting that is shared."""
