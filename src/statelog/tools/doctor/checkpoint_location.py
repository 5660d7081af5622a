"""Checks that Spark can keep its checkpoint at an ``s3a:`` location, and that statelog's own client sees the same."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from pyspark.sql import SparkSession

from statelog.errors import StatelogError, StorageError
from statelog.spark.checkpoint.checkpoint import OFFSETS
from statelog.spark.checkpoint.location import HadoopFiles
from statelog.spark.driver import internals
from statelog.storage import Store
from statelog.storage.location import ObjectLocation
from statelog.storage.s3a import PREFIX, credentials_source
from statelog.storage.store import if_present
from statelog.tools.doctor.finding import Finding, Findings, Place

CHECK: Final = "checkpoint-location"
SCHEME: Final = "s3a"

STUCK: Final = (
    f"Spark's Hadoop repeats requests for minutes. Check {PREFIX}endpoint and {PREFIX}endpoint.region, and whether this"
    " host can reach the endpoint. Changed settings take effect only when the application is started again."
)
_MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"
_ABORTABLE: Final = "AbortableStreamBasedCheckpointFileManager"
_LONGEST: Final = 400

# What a failure of S3A means, by words of its exceptions; the first that fits counts.
_REMEDIES: Final = (
    (
        r"NoClassDefFoundError|ClassNotFoundException|NoSuchMethodError|NoSuchFieldError",
        "Classes that S3A needs are missing, or have other versions: add {packages}.",
    ),
    (
        r"NoAuthWithAWS|NoAwsCredentials|No AWS Credentials|Unable to load credentials|Unable to load AWS",
        "Set spark.hadoop.fs.s3a.access.key and spark.hadoop.fs.s3a.secret.key before the session is made, or name a"
        " class in spark.hadoop.fs.s3a.aws.credentials.provider that finds credentials on this host. The environment"
        " counts for Hadoop only as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
    ),
    (
        r"Status Code: 400|Status Code: 501|XAmzContentSHA256Mismatch|NotImplemented",
        "The server does not accept requests as Hadoop's client sends them. If it is not Amazon's, try"
        " spark.hadoop.fs.s3a.signing-algorithm=AWS4UnsignedPayloadSignerType; see docs/object-stores.md.",
    ),
    (
        r"UnknownStore|NoSuchBucket|does not exist",
        "Create the bucket, or check its name, spark.hadoop.fs.s3a.endpoint and spark.hadoop.fs.s3a.path.style.access.",
    ),
    (
        r"AccessDenied|Forbidden|Status Code: 40[13]|InvalidAccessKeyId|SignatureDoesNotMatch",
        "Check Hadoop's keys (spark.hadoop.fs.s3a.access.key and related settings, or those of a single bucket:"
        " fs.s3a.bucket.NAME.access.key) and their permissions: s3:GetObject, s3:PutObject, s3:DeleteObject and"
        " s3:ListBucket.",
    ),
    (
        r"UnknownHost|ConnectException|Unable to execute HTTP request|ConnectTimeout|SdkClientException",
        "Check spark.hadoop.fs.s3a.endpoint, spark.hadoop.fs.s3a.endpoint.region, spark.hadoop.fs.s3a.path.style.access"
        " and spark.hadoop.fs.s3a.connection.ssl.enabled, and whether this host can reach the endpoint.",
    ),
)
_OTHERWISE: Final = "Check that Spark itself can read and write there. Its settings spark.hadoop.fs.s3a.* apply."
_NO_CREDENTIALS: Final = (
    "If this is not intended, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of driver and"
    " executors, or call statelog.use_s3a_settings(spark) before queries are built: state then uses Hadoop's."
)


def credentials_finding(location: str, place: Place) -> Finding:
    """Where statelog's own client gets its credentials from."""
    source = credentials_source(ObjectLocation.parse(location).bucket, os.environ)
    return place.ok(CHECK, f"statelog's own client gets its credentials from {source}. {_NO_CREDENTIALS}")


def check_checkpoint_location(session: SparkSession, location: str, store: Store | None, place: Place) -> Findings:
    """Write, read, list and delete a file in the location as Spark does, and look for it with statelog's own client.

    `store` is the location's store; None if it cannot be used.
    """
    yield credentials_finding(location, place)
    packages = f"hadoop-aws of version {internals.hadoop_version(session)}, with its dependencies"
    if not internals.file_system_scheme(session, location):
        yield place.warning(
            CHECK,
            f"Spark's Hadoop has no class for {SCHEME}:, so the location can hold state, but not Spark's checkpoint.",
            f"For a checkpointLocation add {packages}: --packages org.apache.hadoop:hadoop-aws:"
            f"{internals.hadoop_version(session)}.",
        )
        return
    folder = f"doctor-{secrets.token_hex(8)}"
    name = f"{folder}/0"
    try:
        files = HadoopFiles(session, location)
        try:
            yield from _of_files(files, name, place)
            if store is not None:
                yield from _of_both(files, name, store, place)
        finally:
            with suppress(StatelogError):
                files.delete(folder)  # a write that was refused leaves a temporary file
    except StatelogError as error:
        yield _failed(error, packages, place)
        return
    yield from _of_manager(files, place)


def _of_files(files: HadoopFiles, name: str, place: Place) -> Iterator[Finding]:
    """List a folder, write a new file, check that it is not replaced unintentionally, replace it, and read it."""
    content = name.encode()
    files.list(OFFSETS)  # a folder of Spark's, which may be missing
    files.create(name, b"first")
    try:
        files.create(name, b"second")
    except StorageError:
        is_kept = files.read(name) == b"first"
    else:
        is_kept = False
    if not is_kept:
        yield place.error(
            CHECK,
            f"In {files.location} Spark's {files.manager} replaces a file that must not be replaced.",
            f"A second driver's offsets could replace those of the first one. Remove {_MANAGER}, or set a class"
            f" that refuses to replace files: {_ABORTABLE} of spark-hadoop-cloud.",
        )
    files.write(name, content)
    if files.read(name) != content:
        yield place.error(
            CHECK,
            f"{files.location}/{name} was written through Spark's Hadoop, but other bytes were read.",
            "Use a store that shows a finished write to every read; docs/object-stores.md names some.",
        )


def _of_both(files: HadoopFiles, name: str, store: Store, place: Place) -> Iterator[Finding]:
    try:
        seen = if_present(lambda: store.read(name))
    except StatelogError as error:
        yield place.failed(CHECK, error)
        return
    if seen == name.encode():
        yield place.ok(
            CHECK,
            f"Spark lists, writes, replaces and reads files in {files.location} by {files.manager}, and statelog's own"
            " client sees them.",
        )
        return
    yield place.error(
        CHECK,
        f"statelog's own client does not see a file that Spark's Hadoop has written in {files.location}: it reaches"
        " another bucket of this name.",
        f"Set the same endpoint for both: {PREFIX}endpoint for Hadoop, and AWS_ENDPOINT_URL, or"
        " statelog.use_s3a_settings(spark), for statelog.",
    )


def _of_manager(files: HadoopFiles, place: Place) -> Iterator[Finding]:
    if files.manager != _ABORTABLE:
        yield place.ok(
            CHECK,
            f"Spark writes each of its files in {files.location} under another name and renames it: in S3 that is a"
            f" copy and a delete. {_ABORTABLE} of spark-hadoop-cloud, as {_MANAGER}, writes a file at once; see"
            " docs/object-stores.md.",
        )


def _failed(error: StatelogError, packages: str, place: Place) -> Finding:
    fitting = (remedy for words, remedy in _REMEDIES if re.search(words, error.message))
    remedy = next(fitting, _OTHERWISE).format(packages=packages)
    return place.error(CHECK, " ".join(error.message.split())[:_LONGEST], remedy)
