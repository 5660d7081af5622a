"""What numbers in stored documents may be; a decoder refuses a document with any other."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from statelog.runs.key_groups import KEY_GROUPS

Natural = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""A count, a size or a place."""
Parallelism = Annotated[int, Meta(ge=1, le=KEY_GROUPS)]
KeyHash = Annotated[int, Meta(ge=0)]
