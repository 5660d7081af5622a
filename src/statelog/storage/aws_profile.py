"""Credentials of a named AWS profile, which the client library of object stores does not read itself."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

from statelog.errors import ConfigurationError

_PROFILE: Final = "AWS_PROFILE"
_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# botocore renews credentials 10 minutes before they expire at the latest, so those that it gives are good for so long.
_ASK_AGAIN: Final = timedelta(minutes=5)


def profile_arguments(settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The profile that the environment's `settings` name, for a client of S3: more settings, and its credentials.

    Both are empty if the environment names no profile, or has a key, which counts more. A region or endpoint of the
    environment counts more than the profile's. Raises ConfigurationError if the profile cannot be used.
    """
    name = settings.get(_PROFILE)
    if not name or any(key in settings for key in _KEYS):
        return {}, {}
    auth, botocore = _libraries(name)
    session = botocore.session.Session(profile=name)
    try:
        if session.get_credentials() is None:
            raise _unusable(name, "it leads to no credentials")
        region = session.get_config_variable("region")
        endpoint = session.get_scoped_config().get("endpoint_url")
        provider = auth.Boto3CredentialProvider(session, ttl=_ASK_AGAIN)
    except botocore.exceptions.BotoCoreError as error:
        raise _unusable(name, " ".join(str(error).split()).rstrip(".")) from None
    found = {}
    if region and not any(one in settings for one in _REGIONS):
        found["AWS_REGION"] = region
    if endpoint and not any(one in settings for one in _ENDPOINTS):
        found["AWS_ENDPOINT_URL"] = endpoint
    return found, {"credential_provider": provider}


def _unusable(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The profile {name!r} that AWS_PROFILE names cannot be used: {reason}.",
        hint="Correct it in ~/.aws/config or ~/.aws/credentials of this host, log in (aws sso login) if it is one of"
        " IAM Identity Center, or unset AWS_PROFILE and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; see"
        " docs/object-stores.md.",
    )


def _libraries(name: str) -> tuple[Any, ModuleType]:
    try:
        import botocore.exceptions
        import botocore.session
        from obstore.auth import boto3 as auth
    except ImportError as error:
        raise ConfigurationError(
            f"AWS_PROFILE names the profile {name!r}; boto3, which reads profiles, cannot be imported: {error}.",
            hint="Install statelog[aws] on the driver and all executors, or unset AWS_PROFILE and set"
            " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or rely on a role; see docs/object-stores.md.",
        ) from None
    return auth, botocore
