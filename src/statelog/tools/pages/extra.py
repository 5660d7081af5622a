"""Tells what to install for the page."""

from __future__ import annotations

from statelog.errors import ConfigurationError, ErrorKind


def require_extra() -> None:
    """Raise ConfigurationError if a package of the page is not installed."""
    try:
        import jinja2  # noqa: F401
        import waitress  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"The checkpoint page needs {error.name}, which is not installed.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="pip install 'statelog[ui]'",
        ) from error
