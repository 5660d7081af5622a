"""The program of the store's host: an S3 server, whose clients' environment it writes into a file."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from tests.s3.server import BUCKET, RadosGateway


def main(host: str, file: str) -> None:
    """Serve on a host's address until this process is killed."""
    with RadosGateway(host=host) as server:
        server.create_bucket(BUCKET)
        temporary = Path(f"{file}.tmp")
        temporary.write_text(json.dumps(server.environment))
        temporary.rename(file)
        while True:
            signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
