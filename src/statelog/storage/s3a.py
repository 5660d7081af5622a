"""Hadoop's S3 settings (``fs.s3a.*``) for statelog's own client, in processes that were told to use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind

PREFIX: Final = "fs.s3a."

_BUCKET: Final = "bucket."
_ACCESS: Final = "access.key"
_SECRET: Final = "secret.key"
_TOKEN: Final = "session.token"
_ENDPOINT: Final = "endpoint"
_REGION: Final = "endpoint.region"
_PATH_STYLE: Final = "path.style.access"
_TLS: Final = "connection.ssl.enabled"
_PROVIDERS: Final = "aws.credentials.provider"
_ENCRYPTIONS: Final = ("encryption.algorithm", "server-side-encryption-algorithm")
_USED: Final = (_ACCESS, _SECRET, _TOKEN, _ENDPOINT, _REGION, _PATH_STYLE, _TLS, _PROVIDERS, *_ENCRYPTIONS)

_OF_KEYS: Final = {"SimpleAWSCredentialsProvider", "TemporaryAWSCredentialsProvider"}
# The client finds by itself what these providers find.
_OF_ENVIRONMENT: Final = {
    "EnvironmentVariableCredentialsProvider",
    "IAMInstanceCredentialsProvider",
    "InstanceProfileCredentialsProvider",
    "ContainerCredentialsProvider",
    "WebIdentityTokenFileCredentialsProvider",
}

# The environment's credentials, in the order in which the client takes them, with a description of each.
_SOURCES: Final = {
    "AWS_ACCESS_KEY_ID": "the environment's AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY": "the environment's AWS_SECRET_ACCESS_KEY",
    "AWS_PROFILE": "the profile that AWS_PROFILE names",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "the web identity of AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "the task's role (AWS_CONTAINER_CREDENTIALS_RELATIVE_URI)",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "the container's role (AWS_CONTAINER_CREDENTIALS_FULL_URI)",
}
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_ENVIRONMENT_ENCRYPTION: Final = "AWS_SERVER_SIDE_ENCRYPTION"

_HINT: Final = "Set AWS_* variables in the environment of driver and executors instead; see docs/object-stores.md."


@dataclass(frozen=True, slots=True)
class S3aSettings:
    """Hadoop's settings that the client can use; picklable, and shown without their values."""

    values: Mapping[str, str] = field(repr=False)
    """By name, without the prefix; the names of settings for one bucket begin with ``bucket.NAME.``."""

    @staticmethod
    def of(properties: Mapping[str, str]) -> S3aSettings:
        """The usable settings among the properties of a Hadoop configuration."""
        names = (name.removeprefix(PREFIX) for name in properties if name.startswith(PREFIX))
        return S3aSettings({name: properties[PREFIX + name] for name in names if _is_of(name, _USED)})

    def added(self, bucket: str, environment: Mapping[str, str]) -> dict[str, str]:
        """The settings that a bucket's client gets in addition to the environment's, which take precedence.

        They are named like the environment's. Raises ConfigurationError if the client cannot do what Hadoop's would do.
        """
        return dict(self._added(bucket, environment))

    def has_any(self) -> bool:
        """Whether any of them says where a bucket is, or who asks: the rest has defaults in Hadoop."""
        wanted = (_ACCESS, _SECRET, _TOKEN, _ENDPOINT, _REGION)
        return any(value.strip() and _is_of(name, wanted) for name, value in self.values.items())

    def has_keys(self, bucket: str) -> bool:
        """Whether there are keys for a bucket."""
        return bool(self._get(bucket, _ACCESS) and self._get(bucket, _SECRET))

    def _added(self, bucket: str, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        if not any(name in environment for name in _SOURCES):
            yield from self._credentials(bucket)
        if any(self._get(bucket, name) for name in _ENCRYPTIONS) and _ENVIRONMENT_ENCRYPTION not in environment:
            raise ConfigurationError(
                f"{PREFIX}{_ENCRYPTIONS[0]} is set for {bucket}, but statelog's client would write without it.",
                kind=ErrorKind.UNSUPPORTED_SETTING,
                hint=f"Set {_ENVIRONMENT_ENCRYPTION} in the environment of driver and executors, or let the bucket"
                " encrypt by default and unset Hadoop's setting.",
            )
        region, endpoint = self._get(bucket, _REGION), self._get(bucket, _ENDPOINT)
        if region and not any(name in environment for name in _REGIONS):
            yield "AWS_REGION", region
        if endpoint and endpoint != "s3.amazonaws.com" and not any(name in environment for name in _ENDPOINTS):
            yield from self._address(bucket, endpoint)

    def _credentials(self, bucket: str) -> Iterator[tuple[str, str]]:
        named = [name.strip() for name in self._get(bucket, _PROVIDERS).split(",") if name.strip()]
        providers = [name.rpartition(".")[2] for name in named]
        unknown = [name for name, one in zip(named, providers, strict=True) if one not in _OF_KEYS | _OF_ENVIRONMENT]
        if unknown:
            raise ConfigurationError(
                f"{PREFIX}{_PROVIDERS} names {', '.join(unknown)}, which statelog's client cannot use.",
                kind=ErrorKind.UNSUPPORTED_SETTING,
                hint=_HINT,
            )
        if providers and not _OF_KEYS.intersection(providers):
            return
        if self.has_keys(bucket):
            yield "AWS_ACCESS_KEY_ID", self._get(bucket, _ACCESS)
            yield "AWS_SECRET_ACCESS_KEY", self._get(bucket, _SECRET)
            if token := self._get(bucket, _TOKEN):
                yield "AWS_SESSION_TOKEN", token

    def _address(self, bucket: str, endpoint: str) -> Iterator[tuple[str, str]]:
        scheme, separator, host = endpoint.partition("://")
        if not separator:
            scheme = "http" if self._get(bucket, _TLS).lower() == "false" else "https"
            host = endpoint
        if self._get(bucket, _PATH_STYLE).lower() == "true":
            yield "AWS_ENDPOINT_URL", f"{scheme}://{host}"
        else:
            yield "AWS_ENDPOINT_URL", f"{scheme}://{bucket}.{host}"
            yield "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true"
        if scheme == "http":
            yield "AWS_ALLOW_HTTP", "true"

    def _get(self, bucket: str, name: str) -> str:
        return self.values.get(f"{_BUCKET}{bucket}.{name}", self.values.get(name, "")).strip()


def _is_of(name: str, names: tuple[str, ...]) -> bool:
    """Whether a setting is one of these, for all buckets or for one."""
    return name in names or (name.startswith(_BUCKET) and name.endswith(tuple(f".{one}" for one in names)))


# ---- The settings of this process ----


_adopted: S3aSettings | None = None


def adopt_s3a(settings: S3aSettings | None) -> None:
    """Make the clients of this process use Hadoop's settings, or none."""
    global _adopted
    _adopted = settings


def adopted_s3a() -> S3aSettings | None:
    """Hadoop's settings that this process uses."""
    return _adopted


def credentials_source(bucket: str, environment: Mapping[str, str]) -> str:
    """The source of the credentials of a bucket's client, in words."""
    for name, source in _SOURCES.items():
        if name in environment:
            return source
    if _adopted is not None and _adopted.has_keys(bucket):
        return f"Hadoop's {PREFIX}{_ACCESS}"
    return "the instance's role, because nothing else is set"
