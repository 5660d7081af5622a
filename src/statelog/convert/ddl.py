"""Parsers of Spark's types that need no JVM: of its DDL, such as ``user string, total decimal(10,2)``, and of its JSON.

The grammar is the part of Spark's ``colTypeList`` and ``dataType`` (SqlBaseParser.g4) that describes columns. Queries
use Spark's own parser; this one is for ``statelog.testing``, which has none. Type JSON that comes from a store is
parsed here, because Spark's own parser unpickles user-defined types, or imports the modules that they name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, Final

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
    VarcharType,
    VariantType,
    YearMonthIntervalType,
)

from statelog.convert.newer_types import TimeType
from statelog.errors import CorruptionError, ErrorKind, StatelogError

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<number>\d+)(?!\w)
      | (?P<word>\w+)
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
_UNITS: Final = [(("day", "hour", "minute", "second"), DayTimeIntervalType), (("year", "month"), YearMonthIntervalType)]
"""The units of each kind of interval, and its type."""
_LARGEST_PRECISION: Final = 38


def parse_ddl(text: str) -> DataType:
    """Parse columns, such as ``user string NOT NULL, tags array<string>``, into a struct, or else a single type.

    Raises ValueError, whose message names the position, for any other text.
    """
    failed: list[tuple[int, ValueError]] = []
    for read in (_Parser.type, _Parser.columns):
        parser = _Parser(text)
        try:
            return parser.whole(read)
        except ValueError as error:
            failed.insert(0, (parser.position, error))
    raise max(failed, key=itemgetter(0))[1]


class _Parser:
    """Parses the tokens of a text, beginning with the first."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_TOKEN.finditer(text))
        self._next = 0

    def whole(self, read: Callable[[_Parser], DataType]) -> DataType:
        """Parse with `read`, which must consume the whole text."""
        kind = read(self)
        if self._kind != "end":
            raise self._expected("',' or the end of the text")
        return kind

    def columns(self) -> StructType:
        """Parse ``name type [NOT NULL] [COMMENT text]``, once or more, separated by commas."""
        fields = [self._field()]
        while self._take(","):
            fields.append(self._field())
        return StructType(fields)

    def type(self) -> DataType:
        """Parse a type."""
        name = self._token.lower()
        if name in _PLAIN:
            self._next += 1
            return _PLAIN[name]()
        if name not in _PARAMETRIC:
            raise self._expected("a type")
        self._next += 1
        return _PARAMETRIC[name](self)

    # ---- Tokens ----

    @property
    def position(self) -> int:
        """Position of the next token in the text."""
        return self._tokens[self._next].start(self._kind)

    @property
    def _kind(self) -> str:
        return str(self._tokens[self._next].lastgroup)

    @property
    def _token(self) -> str:
        """The next token; empty at the end."""
        return self._tokens[self._next][self._kind]

    def _expected(self, what: str) -> ValueError:
        found = "the end of the text" if self._kind == "end" else f"'{self._token}'"
        return ValueError(f"expected {what} at position {self.position + 1} of {self._text!r}, found {found}")

    def _take(self, text: str) -> bool:
        """Consume the next token if it is this word or sign."""
        is_there = self._token.lower() == text
        self._next += is_there
        return is_there

    def _require(self, text: str) -> None:
        if not self._take(text):
            raise self._expected(f"'{text}'")

    def _require_kind(self, what: str, *kinds: str) -> str:
        token = self._token
        if self._kind not in kinds or token == "``":
            raise self._expected(what)
        self._next += 1
        return token

    def _number(self) -> int:
        return int(self._require_kind("a number", "number"))

    def _name(self) -> str:
        name = self._require_kind("a name", "word", "quoted")
        return name[1:-1].replace("``", "`") if name[0] == "`" else name

    # ---- Columns and fields ----

    def _field(self) -> StructField:
        name = self._name()
        self._take(":")
        kind = self.type()
        nullable = not self._take("not")
        if not nullable and not self._take("null"):
            raise self._expected("NULL")
        metadata = {"comment": self._comment()} if self._take("comment") else None
        return StructField(name, kind, nullable, metadata)

    def _comment(self) -> str:
        text = self._require_kind("a text in quotes", "text")
        quote = text[0]
        return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), text[1:-1].replace(quote * 2, quote))

    # ---- Types with parameters ----

    def _parts(self, form: str) -> list[Any]:
        """Parse signs, types (T) and numbers (n) in the order of `form`; returns the types and numbers."""
        parts: list[Any] = []
        for sign in form:
            if sign == "T":
                parts.append(self.type())
            elif sign == "n":
                parts.append(self._number())
            else:
                self._require(sign)
        return parts

    def _string(self) -> DataType:
        return StringType(self._name()) if self._take("collate") else StringType()

    def _time(self) -> DataType:
        return TimeType(*self._parts("(n)")) if self._token == "(" else TimeType()

    def _decimal(self) -> DataType:
        if not self._take("("):
            return DecimalType(10, 0)
        at = self.position
        precision = self._number()
        scale = self._number() if self._take(",") else 0
        self._require(")")
        if not 1 <= precision <= _LARGEST_PRECISION or scale > precision:
            raise ValueError(
                f"a decimal has at most 38 digits, and no more decimal places than digits: ({precision},{scale}) at"
                f" position {at + 1} of {self._text!r}"
            )
        return DecimalType(precision, scale)

    def _interval(self) -> DataType:
        for units, make in _UNITS:
            if self._token.lower() not in units:
                continue
            first = last = units.index(self._token.lower())
            self._next += 1
            if self._take("to"):
                if self._token.lower() not in units[first + 1 :]:
                    raise self._expected("a smaller unit of the interval")
                last = units.index(self._token.lower())
                self._next += 1
            interval: DataType = make(first, last)
            return interval
        return CalendarIntervalType()

    def _struct(self) -> DataType:
        self._require("<")
        if self._take(">"):
            return StructType([])
        fields = self.columns()
        self._require(">")
        return fields


_PARAMETRIC: Final[dict[str, Callable[[_Parser], DataType]]] = {
    "array": lambda parser: ArrayType(*parser._parts("<T>")),
    "char": lambda parser: CharType(*parser._parts("(n)")),
    "character": lambda parser: CharType(*parser._parts("(n)")),
    "dec": _Parser._decimal,
    "decimal": _Parser._decimal,
    "interval": _Parser._interval,
    "map": lambda parser: MapType(*parser._parts("<T,T>")),
    "numeric": _Parser._decimal,
    "string": _Parser._string,
    "struct": _Parser._struct,
    "time": _Parser._time,
    "varchar": lambda parser: VarcharType(*parser._parts("(n)")),
}


_COLLATIONS: Final = "__COLLATIONS"
"""Key of a field's metadata: the collations of the strings in it, by path."""


def parse_type_json(text: str, subject: str) -> StructType:
    """Parse the columns that :meth:`StructType.json` describes; `subject` names the text in messages.

    Raises CorruptionError for any other text, and for types that are not Spark's own.
    """
    try:
        kind = _type(json.loads(text), "", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StatelogError) as error:
        raise _unknown(subject, f"{type(error).__name__}: {error}") from None
    if not isinstance(kind, StructType):
        raise _unknown(subject, "it is not a struct")
    return kind


def _type(value: Any, path: str, collations: Mapping[str, str]) -> DataType:
    """A type; `path` leads to it from its field, which has the `collations` of strings."""
    if isinstance(value, str):
        if value == "string" and path in collations:
            return StringType(collations[path])
        kind = parse_ddl(value)
        if isinstance(kind, (ArrayType, MapType, StructType)):
            raise ValueError(f"{value!r:.80} is not a type name")
        return kind
    match value["type"]:
        case "struct":
            return StructType([_field(field) for field in value["fields"]])
        case "array":
            element = _type(value["elementType"], _below(path, "element"), collations)
            return ArrayType(element, _flag(value["containsNull"]))
        case "map":
            key = _type(value["keyType"], _below(path, "key"), collations)
            item = _type(value["valueType"], _below(path, "value"), collations)
            return MapType(key, item, _flag(value["valueContainsNull"]))
        case "udt":
            raise ValueError("a user-defined type is code, which is not loaded from a store")
        case other:
            raise ValueError(f"{other!r:.80} is not a type")


def _field(value: Any) -> StructField:
    metadata = dict(value.get("metadata") or {})
    # Spark writes the collation's provider in front of its name.
    collations = {path: str(name).partition(".")[2] for path, name in dict(metadata.pop(_COLLATIONS, {})).items()}
    name = value["name"]
    if not isinstance(name, str):
        raise TypeError(f"{name!r:.80} is not a field name")
    return StructField(name, _type(value["type"], name, collations), _flag(value.get("nullable", True)), metadata)


def _below(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.80} is neither true nor false")
    return value


def _unknown(subject: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"{subject}: the description of its columns is not one of Spark's types: {reason}.",
        kind=ErrorKind.FORMAT,
        hint="Another program may have written or changed it. Restore the file from a copy.",
    )
