"""Foundation of the package: settings, timeouts, limits and the log. It imports nothing from other packages of it."""

from monarch_backend._core import log_limit

log_limit.install()
