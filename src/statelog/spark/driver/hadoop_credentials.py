"""Lets statelog's own client of S3 use the settings by which the session's Hadoop reaches buckets."""

from __future__ import annotations

from pyspark.sql import SparkSession

from statelog.errors import ConfigurationError, ErrorKind
from statelog.spark.driver import internals
from statelog.storage.s3a import PREFIX, S3aSettings, adopt_s3a


def use_s3a_settings(session: SparkSession) -> None:
    """Use Hadoop's settings for ``s3a:`` also for state in S3, where the environment has none.

    Call it in the driver's program, before a query is built. The tasks of the query get the settings with the query's
    code, like the secret with which they call the driver. The settings are never logged or stored, and no error shows
    them. A call replaces what an earlier one has read: tasks of queries that are built later have the new settings.

    The settings are ``fs.s3a.access.key``, ``secret.key`` and ``session.token``, ``endpoint``, ``endpoint.region``,
    ``path.style.access`` and ``connection.ssl.enabled``, and their values for one bucket, ``fs.s3a.bucket.NAME.``.
    Keys in the environment, or any other source of credentials that it names, take precedence over Hadoop's, and so do
    its region and endpoint.

    Parameters
    ----------
    session : SparkSession
        A classic session; its settings take precedence over those of ``spark.hadoop.*``.

    Raises
    ------
    ConfigurationError
        If Hadoop has none of these settings. The first request to a bucket raises it if Hadoop would do something that
        statelog's client cannot do, such as call a class that provides credentials (kind ``unsupported-setting``).

    Examples
    --------
    >>> statelog.use_s3a_settings(spark)  # doctest: +SKIP
    """
    if not isinstance(session, SparkSession) or not internals.is_classic(session):
        raise ConfigurationError(
            f"use_s3a_settings takes a classic Spark session, not {type(session).__name__}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Pass the session that SparkSession.builder made in the driver.",
        )
    settings = S3aSettings.of(internals.hadoop_settings(session, PREFIX))
    if not settings.has_any():
        raise ConfigurationError(
            f"The session's Hadoop has no keys, region or endpoint in {PREFIX}*.",
            hint=f"Set spark.hadoop.{PREFIX}access.key and related settings before the session is created, or omit"
            " this call: credentials are then taken from the environment. Keys in files of Hadoop's credential"
            " providers are not read.",
        )
    adopt_s3a(settings)
