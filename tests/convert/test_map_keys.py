"""Keys of a map: a conversion loses no entry."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.types import IntegerType, MapType, StringType

from statelog.convert.python_values import to_storage

KIND = MapType(StringType(), IntegerType())


@pytest.mark.parametrize("given", [{5: 1, "5": 2}, [("a", 1), ("a", 2)]], ids=["a mapping", "pairs"])
def test_a_map_is_refused_if_two_of_its_keys_become_one(given: Any) -> None:
    with pytest.raises(ValueError, match="two of its keys become one"):
        to_storage(KIND)(given)


@pytest.mark.parametrize("given", [{5: 1, "6": 2}, [(5, 1), ("6", 2)]], ids=["a mapping", "pairs"])
def test_keys_that_stay_different_are_converted(given: Any) -> None:
    assert to_storage(KIND)(given) == {"5": 1, "6": 2}
