"""Messages of HTTP/1.1, read whole and kept as they were sent."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Final

__all__ = ["Message", "read_answer", "read_request"]

_NO_BODY: Final = (204, 304)


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer.

    Parameters
    ----------
    head : bytes
        The first line and the headers, with the empty line that ends them.
    body : bytes
        The body, in the encoding in which it was transferred.
    is_last : bool
        Whether the connection ends with it.
    """

    head: bytes
    body: bytes
    is_last: bool

    @property
    def first_line(self) -> list[str]:
        """Its three parts: method, target and version, or version, status and reason."""
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)


async def read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Message | None:
    """Read a request; None at the end of the connection. Who asks whether to continue is told so."""
    try:
        head = await _read_head(reader)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    if b"100-continue" in head.lower():
        # Answered here, and not asked again of the server.
        head = re.sub(rb"(?i)\r\nexpect: *100-continue", b"", head)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    headers = _headers(head)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _read_chunks(reader)
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Message(head, body, headers.get("connection", "").lower() == "close")


async def read_answer(reader: asyncio.StreamReader, method: str) -> Message:
    """Read the answer to a request of this method."""
    status = 100
    while status < 200:
        head = await _read_head(reader)
        status = int(head.split(b" ", 2)[1])
    headers = _headers(head)
    is_last = headers.get("connection", "").lower() == "close"
    if method == "HEAD" or status in _NO_BODY:
        body = b""
    elif headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _read_chunks(reader)
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body, is_last = await reader.read(), True
    return Message(head, body, is_last)


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    """A chunked body as it is, without what its encoding means."""
    parts = []
    size = -1
    while size != 0:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        parts += [line, await reader.readexactly(size + 2) if size else b""]
    while parts[-1] != b"\r\n":  # trailers, then an empty line
        parts.append(await reader.readuntil(b"\r\n"))
    return b"".join(parts)


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
