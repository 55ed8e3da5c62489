"""Changes of torch: the manifests of replaced names and of entries in its tables, and the replacements by kind."""
