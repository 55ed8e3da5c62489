"""Export of recordings to other tools: Prometheus, OpenTelemetry and torch's flight recorder."""
