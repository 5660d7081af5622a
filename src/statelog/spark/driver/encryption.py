"""What Spark's settings say about the encryption of its own traffic, through which tasks get the driver's secret."""

from __future__ import annotations

from typing import Final, Protocol

from statelog.errors import ConfigurationError, ErrorKind

AUTHENTICATE: Final = "spark.authenticate"
AES: Final = "spark.network.crypto.enabled"
SASL: Final = "spark.authenticate.enableSaslEncryption"
RPC_SSL: Final = "spark.ssl.rpc.enabled"


class Settings(Protocol):
    """The settings of an application."""

    def get(self, key: str, defaultValue: str, /) -> str | None:
        """A setting, or the default."""


def encrypts_traffic(settings: Settings) -> bool:
    """Whether Spark encrypts the traffic between driver and executors; then the tasks' calls are encrypted, too.

    ``spark.ssl.enabled`` does not count: it is for Spark's web pages. Raises ConfigurationError if encryption is
    requested but Spark would not encrypt, so that the secret would reach the tasks unencrypted.
    """
    if is_on(settings, RPC_SSL):
        return True  # Spark itself refuses to start without the keys for it.
    asked = [name for name in (AES, SASL) if is_on(settings, name)]
    if asked and not is_on(settings, AUTHENTICATE):  # Spark's own SparkContext refuses this; a platform's may not.
        raise ConfigurationError(
            f"{asked[0]} is on and {AUTHENTICATE} is not, so Spark encrypts nothing: the secret of the tasks' calls"
            " would reach the executors unencrypted.",
            kind=ErrorKind.UNSUPPORTED_SETTING,
            hint=f"Set {AUTHENTICATE} to true and, except on YARN and Kubernetes, spark.authenticate.secret.",
        )
    return bool(asked)


def is_on(settings: Settings, name: str, *, default: bool = False) -> bool:
    """Whether a setting is true."""
    return str(settings.get(name, str(default))).strip().lower() == "true"
