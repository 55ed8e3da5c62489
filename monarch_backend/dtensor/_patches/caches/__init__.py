"""Replacements that only save time."""
