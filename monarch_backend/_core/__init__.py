"""What every part of the package stands on: settings, timeouts and the log. Imports nothing else of the package."""

from monarch_backend._core import log_limit

log_limit.install()
