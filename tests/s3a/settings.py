"""Settings of a Spark session for a checkpointLocation in the tests' S3 server."""

from __future__ import annotations

from typing import Final

from tests.s3.server import RadosGateway

MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"
MANAGERS: Final = {
    "rename": "org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager",
    "abort": "org.apache.spark.internal.io.cloud.AbortableStreamBasedCheckpointFileManager",
}
"""Spark's file managers for S3A: the one that it takes by itself, and the one that is made for object stores."""


def s3a_settings(server: RadosGateway) -> dict[str, str]:
    """Hadoop's settings by which S3A finds the server, and is let in."""
    environment = server.environment
    return {
        "fs.s3a.endpoint": server.address,
        "fs.s3a.endpoint.region": environment["AWS_REGION"],
        "fs.s3a.path.style.access": "true",
        "fs.s3a.access.key": environment["AWS_ACCESS_KEY_ID"],
        "fs.s3a.secret.key": environment["AWS_SECRET_ACCESS_KEY"],
        # By default a body is sent in signed chunks, and this server takes no empty body so: the mark of a folder.
        "fs.s3a.signing-algorithm": "AWS4UnsignedPayloadSignerType",
    }
