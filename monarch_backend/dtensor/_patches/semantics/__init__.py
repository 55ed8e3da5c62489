"""Replacements where torch acts for the rank of this process."""
