"""Replaced names of torch: the manifest, and the replacements by kind."""
