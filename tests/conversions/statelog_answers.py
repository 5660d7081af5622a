"""Asks statelog, without Spark: the same values through the codecs that every table and every mode uses.

``TZ=America/New_York ./dev python -m tests.conversions.statelog_answers`` writes ``statelog.txt``.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.types import StructType

from statelog.convert.codecs import FrameCodecs, RowCodecs
from statelog.convert.ddl import parse_ddl
from statelog.convert.types import state_codecs
from statelog.errors import ConfigurationError, ProcessorError
from statelog.runs.keys import MapKeyCodec
from tests.conversions.answers import STATELOG, Answers, write
from tests.conversions.cases import TYPES, VALUES, ZONE, show, value
from tests.conversions.probes import STATES, frame_of

WAYS = (*STATES, "output row", "output frame")


def ask() -> Answers:
    """What becomes of every value, in all types and ways; the processes' zone must be that of the cases."""
    return {(kind, way, text): answer(kind, way, text) for kind in TYPES for way in WAYS for text in VALUES}


def answer(kind: str, way: str, text: str) -> str:
    """What becomes of a value."""
    try:
        schema = parse_ddl(f"text string, f {kind}")
        assert isinstance(schema, StructType)
        if way in STATES:
            return _of_state(StructType([schema["f"]]), way, text)
        form = FrameCodecs() if way == "output frame" else RowCodecs()
        given = frame_of(text, value(text)) if way == "output frame" else Row(text=text, f=value(text))
        batch = form.output(schema, ZONE, "main").encode([given], lambda row: "the key")
        (result,) = batch.column("f").to_pylist()
        return show(result)
    except ProcessorError:
        return "error"
    except ConfigurationError:
        return "refused"


def _of_state(schema: StructType, way: str, text: str) -> str:
    codec, entry_codec = state_codecs("state", schema, schema if way.endswith("map key") else None)
    row = value(text) if way.startswith("bare") else (value(text),)
    if entry_codec is not None:
        (result,) = MapKeyCodec(entry_codec).decode(MapKeyCodec(entry_codec).encode(row))
    else:
        held = codec.hold(row)
        (column,) = codec.encode([held], lambda row: "the key")
        ((result,),) = codec.decode(pa.RecordBatch.from_arrays([column], names=["f"]))
        for (shown,) in (codec.normalize(row), codec.read_held(held)):
            assert show(result) == show(shown), "what is read in the batch is what is read in the next"
    return show(result)


if __name__ == "__main__":
    write(STATELOG, ask())
