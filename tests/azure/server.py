"""A server of Azure's blobs for tests: Microsoft's own emulator, Azurite, with its data in memory."""

from __future__ import annotations

import base64
import hashlib
import hmac
import queue
import re
import shutil
import subprocess
import threading
from contextlib import closing
from email.utils import formatdate
from http.client import HTTPConnection
from typing import Final

from tests.servers import LocalServer

CONTAINER: Final = "statelog-tests"
"""The container of the tests."""

# The account and its key are those of every Azurite.
_ACCOUNT: Final = "devstoreaccount1"
_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_PROGRAM: Final = "azurite-blob"
_START_S: Final = 60.0


def missing_programs() -> list[str]:
    """What must be installed before a server can be started."""
    return [name for name in (_PROGRAM, "setpriv") if shutil.which(name) is None]


class Azurite(LocalServer):
    """A server on loopback, whose data is gone when it stops."""

    def __init__(self) -> None:
        super().__init__("azurite")
        self.address = ""
        """Where it listens."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients find it and are let in."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_ENDPOINT": f"{self.address}/{_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def create_container(self, name: str) -> None:
        """Make a container, which the library used elsewhere cannot."""
        path, version = f"/{_ACCOUNT}/{name}", "2021-12-02"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": version}
        said = "".join(f"{header}:{value}\n" for header, value in headers.items())
        # The method, eleven headers that are not there, those that are, and the path in the account.
        signed = "PUT" + 12 * "\n" + f"{said}/{_ACCOUNT}{path}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(_KEY), signed.encode(), hashlib.sha256)).decode()
        headers["Authorization"] = f"SharedKey {_ACCOUNT}:{signature}"
        with closing(HTTPConnection(self.address.removeprefix("http://"), timeout=_START_S)) as connection:
            connection.request("PUT", f"{path}?restype=container", headers=headers)
            answer = connection.getresponse()
            if answer.status != 201:
                raise RuntimeError(f"Azurite has made no container: {answer.status} {answer.read()!r}")

    def _start(self) -> None:
        process = self._spawn(
            *(_PROGRAM, "--blobHost", "127.0.0.1", "--blobPort", "0"),
            *("--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output = process.stdout
        assert output is not None
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            """Read to the end: a full pipe would stop the server."""
            for line in output:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        said = ""
        while not (found := re.search(r"successfully listen\w+ (?:at|on) (http://\S+)", said)):
            line = lines.get(timeout=_START_S)
            if not line:
                raise RuntimeError(f"Azurite did not start: {said}")
            said += line
        self.address = found[1]
