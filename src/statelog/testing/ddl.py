"""A parser of Spark's DDL for types, such as ``user string, total decimal(10,2)``, that needs no JVM.

The grammar is the part of Spark's ``colTypeList`` and ``dataType`` (SqlBaseParser.g4) that describes columns. Queries
use Spark's own parser; this one is for tests without a session.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CalendarIntervalType,
    CharType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
    VarcharType,
    VariantType,
    YearMonthIntervalType,
)

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<word>\w+)
      | (?P<quoted>`(?:[^`]|``)*`)
      | (?P<text>'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*")
      | (?P<sign>[<>(),:])
      | (?P<other>\S)
      | (?P<end>$)
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}

_PLAIN: Final[dict[str, Callable[[], DataType]]] = {
    "bigint": LongType,
    "binary": BinaryType,
    "boolean": BooleanType,
    "byte": ByteType,
    "date": DateType,
    "double": DoubleType,
    "float": FloatType,
    "int": IntegerType,
    "integer": IntegerType,
    "long": LongType,
    "real": FloatType,
    "short": ShortType,
    "smallint": ShortType,
    "timestamp": TimestampType,
    "timestamp_ltz": TimestampType,
    "timestamp_ntz": TimestampNTZType,
    "tinyint": ByteType,
    "variant": VariantType,
    "void": NullType,
}
_DAY_TIME_UNITS: Final = {"day": 0, "hour": 1, "minute": 2, "second": 3}
_YEAR_MONTH_UNITS: Final = {"year": 0, "month": 1}
_LARGEST_PRECISION: Final = 38


def parse_ddl(text: str) -> DataType:
    """Parse columns, such as ``user string NOT NULL, tags array<string>``, into a struct, or else a single type.

    Raises ValueError, whose message names the position, for any other text.
    """
    tokens = _tokens(text)
    single = _Parser(text, tokens)
    try:
        return single.whole(single.type)
    except ValueError as error:
        columns = _Parser(text, tokens)
        try:
            return columns.whole(lambda: StructType(columns.fields()))
        except ValueError:
            if single.position > columns.position:
                raise error from None
            raise


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    position: int

    @property
    def word(self) -> str:
        """The word in lower case; empty for other tokens."""
        return self.text.lower() if self.kind == "word" else ""

    def __str__(self) -> str:
        return "the end of the text" if self.kind == "end" else f"'{self.text}'"


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = 0
    while True:
        found = _TOKEN.match(text, position)
        assert found is not None, "the last alternatives match everything"
        kind = str(found.lastgroup)
        tokens.append(_Token(kind, found[kind], found.start(kind)))
        if kind == "end":
            return tokens
        position = found.end()


class _Parser:
    """Parses tokens, beginning with the first."""

    def __init__(self, text: str, tokens: list[_Token]) -> None:
        self._text = text
        self._tokens = tokens
        self._next = 0

    def fields(self) -> list[StructField]:
        """Parse ``name type [NOT NULL] [COMMENT text]``, once or more, separated by commas."""
        fields = [self._field()]
        while self._take_sign(","):
            fields.append(self._field())
        return fields

    def type(self) -> DataType:
        """Parse a type."""
        token = self._token
        name = token.word
        if name in _PLAIN:
            self._next += 1
            return _PLAIN[name]()
        reader = _PARAMETRIC.get(name)
        if reader is None:
            raise self._expected("a type")
        self._next += 1
        return reader(self)

    def whole(self, read: Callable[[], DataType]) -> DataType:
        """Parse with `read`, which must consume the whole text."""
        kind = read()
        if self._token.kind != "end":
            raise self._expected("',' or the end of the text")
        return kind

    @property
    def position(self) -> int:
        """Position of the next token in the text."""
        return self._token.position

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _expected(self, what: str) -> ValueError:
        token = self._token
        return ValueError(f"expected {what} at position {token.position + 1} of {self._text!r}, found {token}")

    def _take_sign(self, sign: str) -> bool:
        is_there = self._token.kind == "sign" and self._token.text == sign
        self._next += is_there
        return is_there

    def _require_sign(self, sign: str) -> None:
        if not self._take_sign(sign):
            raise self._expected(f"'{sign}'")

    def _take_word(self, word: str) -> bool:
        is_there = self._token.word == word
        self._next += is_there
        return is_there

    def _number(self) -> int:
        token = self._token
        if token.kind != "word" or not token.text.isdecimal():
            raise self._expected("a number")
        self._next += 1
        return int(token.text)

    # ---- Columns and fields ----

    def _field(self) -> StructField:
        name = self._name()
        self._take_sign(":")
        kind = self.type()
        nullable = True
        if self._take_word("not"):
            if not self._take_word("null"):
                raise self._expected("NULL")
            nullable = False
        metadata = {"comment": self._comment()} if self._take_word("comment") else None
        return StructField(name, kind, nullable, metadata)

    def _name(self) -> str:
        token = self._token
        if token.kind == "quoted" and len(token.text) > 2:
            self._next += 1
            return token.text[1:-1].replace("``", "`")
        if token.kind != "word" or token.text.isdecimal():
            raise self._expected("a name")
        self._next += 1
        return token.text

    def _comment(self) -> str:
        token = self._token
        if token.kind != "text":
            raise self._expected("a text in quotes")
        self._next += 1
        quote = token.text[0]
        return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), token.text[1:-1].replace(quote * 2, quote))

    # ---- Types with parameters ----

    def _string(self) -> DataType:
        if not self._take_word("collate"):
            return StringType()
        return StringType(self._name())

    def _sized(self, make: Callable[[int], DataType]) -> DataType:
        self._require_sign("(")
        length = self._number()
        self._require_sign(")")
        return make(length)

    def _decimal(self) -> DataType:
        precision, scale = 10, 0
        if self._take_sign("("):
            at = self._token
            precision = self._number()
            if self._take_sign(","):
                scale = self._number()
            self._require_sign(")")
            if not 1 <= precision <= _LARGEST_PRECISION or scale > precision:
                raise ValueError(
                    f"a decimal has at most 38 digits, and not more decimals than digits: ({precision},{scale}) at"
                    f" position {at.position + 1} of {self._text!r}"
                )
        return DecimalType(precision, scale)

    def _time(self) -> DataType:
        if not self._take_sign("("):
            return TimeType()
        precision = self._number()
        self._require_sign(")")
        return TimeType(precision)

    def _interval(self) -> DataType:
        for units, make in ((_DAY_TIME_UNITS, DayTimeIntervalType), (_YEAR_MONTH_UNITS, YearMonthIntervalType)):
            start = units.get(self._token.word)
            if start is None:
                continue
            self._next += 1
            end = start
            if self._take_word("to"):
                found = units.get(self._token.word)
                if found is None or found <= start:
                    raise self._expected("a smaller unit of the interval")
                end = found
                self._next += 1
            interval: DataType = make(start, end)
            return interval
        return CalendarIntervalType()

    def _array(self) -> DataType:
        self._require_sign("<")
        element = self.type()
        self._require_sign(">")
        return ArrayType(element)

    def _map(self) -> DataType:
        self._require_sign("<")
        key = self.type()
        self._require_sign(",")
        value = self.type()
        self._require_sign(">")
        return MapType(key, value)

    def _struct(self) -> DataType:
        self._require_sign("<")
        if self._take_sign(">"):
            return StructType([])
        fields = self.fields()
        self._require_sign(">")
        return StructType(fields)


_PARAMETRIC: Final[dict[str, Callable[[_Parser], DataType]]] = {
    "array": _Parser._array,
    "char": lambda parser: parser._sized(CharType),
    "character": lambda parser: parser._sized(CharType),
    "dec": _Parser._decimal,
    "decimal": _Parser._decimal,
    "interval": _Parser._interval,
    "map": _Parser._map,
    "numeric": _Parser._decimal,
    "string": _Parser._string,
    "struct": _Parser._struct,
    "time": _Parser._time,
    "varchar": lambda parser: parser._sized(VarcharType),
}
