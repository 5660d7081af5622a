"""What ``init`` declares, as it is checked when a query is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.core.broadcast import _from_id
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statelog import ArrowProcessor, ConfigurationError, OperatorProcessor, ProcessorError
from statelog.testing import Harness

ROWS = "k string, n long"


class Keyed(StatefulProcessor):
    def __init__(self, declare: Callable[[Any], Any]) -> None:
        self._declare = declare

    def init(self, handle: Any) -> None:
        self._declare(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return ()

    def close(self) -> None:
        pass


class Columns(ArrowProcessor):
    def __init__(self, declare: Callable[[Any], Any]) -> None:
        self._declare = declare

    def init(self, handle: Any) -> None:
        self._declare(handle)

    def process(self, batch: Any) -> Any:
        return None


class Unkeyed(OperatorProcessor):
    def __init__(self, declare: Callable[[Any], Any]) -> None:
        self._declare = declare

    def init(self, handle: Any) -> None:
        self._declare(handle)

    def process(self, rows: Any, context: Any) -> Any:
        return ()


class _Broadcast:
    """Stands for a broadcast variable of Spark: it is pickled in the same way."""

    def __reduce__(self) -> Any:
        return _from_id, (1 << 40,)


class _Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("held", "error", "message"),
    [
        (_Broadcast(), ConfigurationError, r"the processor uses a Spark broadcast variable.*in init\(\)"),
        (_Unreadable(), ProcessorError, "the processor can be pickled but not unpickled: ValueError"),
    ],
)
@pytest.mark.parametrize(("processor", "arguments"), [(Keyed, {"keys": ["k"]}), (Unkeyed, {})])
def test_a_processor_is_a_copy_of_what_was_given(
    processor: Any, arguments: dict[str, Any], held: Any, error: type[Exception], message: str
) -> None:
    made = processor(_value)
    made.held = held
    with pytest.raises(error, match=f"operator 'main': {message}"):
        Harness(made, input=ROWS, output=ROWS, **arguments)


def _value(handle: Any) -> None:
    handle.getValueState("seen", "n long")


def _list(handle: Any) -> None:
    handle.getListState("seen", "n long")


def _map(handle: Any) -> None:
    handle.getMapState("seen", "k long", "n long")


def _reducing(handle: Any) -> None:
    handle.getReducingState("seen", "n long", max)


def _union_list(handle: Any) -> None:
    handle.getUnionListState("seen", "n long")


def _broadcast(handle: Any) -> None:
    handle.getBroadcastState("seen", "k long", "n long")


@pytest.mark.parametrize("declarations", [(_value, _value), (_list, _list), (_map, _map), (_value, _list)])
@pytest.mark.parametrize("processor", [Keyed, Columns])
def test_a_name_stands_for_one_keyed_state(processor: Any, declarations: Any) -> None:
    _expect_refusal(processor, declarations, keys=["k"])


def test_a_name_stands_for_one_reducing_state() -> None:
    _expect_refusal(Keyed, (_reducing, _reducing), keys=["k"])


@pytest.mark.parametrize("declarations", [(_list, _list), (_union_list, _union_list), (_broadcast, _broadcast)])
def test_a_name_stands_for_one_operator_state(declarations: Any) -> None:
    _expect_refusal(Unkeyed, declarations)


def _expect_refusal(processor: Any, declarations: Any, **arguments: Any) -> None:
    def declare(handle: Any) -> None:
        for one in declarations:
            one(handle)

    with pytest.raises(ConfigurationError, match=r"state 'seen' is declared twice in init\(\)"):
        Harness(processor(declare), input=ROWS, output=ROWS, **arguments)
