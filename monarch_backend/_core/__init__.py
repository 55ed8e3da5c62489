"""What every part of the package stands on: settings and timeouts. Imports nothing else of the package."""
