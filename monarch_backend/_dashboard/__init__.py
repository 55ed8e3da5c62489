"""The dashboard: a page and an HTTP API over the recordings of this machine's programs."""
