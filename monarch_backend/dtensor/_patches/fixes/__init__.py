"""Replacements where torch's result is wrong or missing."""
