"""The checkpoints' metrics for OpenTelemetry: instruments that are read when the user's provider collects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

from statelog.coordinator.totals import Totals, exported, optional_library, process_totals
from statelog.metrics import Meaning

_UNITS: Final = {"bytes": "By", "seconds": "s", "milliseconds": "ms", "rows": "{row}", "": "1"}
_ENDS: Final = {"_bytes": ".size", "_s": ".duration", "_ms": ".time"}


def export_to_opentelemetry(meter_provider: Any = None) -> None:
    """Create OpenTelemetry instruments for the metrics of all operators of this driver.

    The instruments are read whenever the provider's readers collect. Call this function once per provider.

    Parameters
    ----------
    meter_provider : opentelemetry.metrics.MeterProvider, optional
        The provider; by default the global one.

    Raises
    ------
    ConfigurationError
        If ``statelog[opentelemetry]`` is not installed.
    """
    _instruments(_library(), meter_provider, process_totals())


def opentelemetry_name(name: str) -> str:
    """The name of a metric in OpenTelemetry, where the unit is not part of it."""
    for end, instead in _ENDS.items():
        if name.endswith(end):
            return f"statelog.{name.removesuffix(end)}{instead}"
    return f"statelog.{name}"


def _library() -> ModuleType:
    def load() -> ModuleType:
        import opentelemetry.metrics

        return opentelemetry.metrics

    return optional_library(load, "export_to_opentelemetry", "opentelemetry")


def _instruments(api: ModuleType, provider: Any, totals: Totals) -> None:
    meter = api.get_meter("statelog", meter_provider=provider)
    for name, meaning in exported().items():
        make = meter.create_observable_counter if meaning.adds_up else meter.create_observable_gauge
        make(opentelemetry_name(name), [_reader(api, totals, name)], _unit(meaning), meaning.text)


def _unit(meaning: Meaning) -> str:
    return _UNITS[meaning.unit]


def _reader(api: ModuleType, totals: Totals, name: str) -> Callable[[Any], Iterable[Any]]:
    per = exported()[name].per

    def read(options: Any) -> Iterable[Any]:
        for reading in totals.read()[name]:
            attributes = {"statelog.operator": reading.uid, "statelog.query": reading.query_id}
            if per:
                attributes[f"statelog.{per}"] = reading.part
            yield api.Observation(reading.value, attributes)

    return read
