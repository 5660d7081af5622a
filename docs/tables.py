"""Makes docs/options.md and the table of docs/metrics.md from the code: ``./dev python docs/tables.py``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Final

from statelog import Options, Tuning
from statelog.coordinator.totals import distributions, exported
from statelog.metrics import Meaning

PAGE: Final = Path(__file__).with_name("options.md")
METRICS_PAGE: Final = Path(__file__).with_name("metrics.md")

_FLINK: Final = {
    "table": "state.backend.type",
    "file_merging": "execution.checkpointing.file-merging.enabled and .across-checkpoint-boundary (off)",
    "max_file_bytes": "execution.checkpointing.file-merging.max-file-size (32 MB)",
    "max_space_amplification": "execution.checkpointing.file-merging.max-space-amplification (2.0)",
    "retained_checkpoints": "execution.checkpointing.num-retained (1)",
    "inline_budget_bytes": "state.changelog.dstl.dfs.batch.persist-size-threshold (10 MB)",
    "upload_part_bytes": "state.changelog.dstl.dfs.preemptive-persist-threshold (5 MB)",
    "max_in_flight_bytes": "state.changelog.dstl.dfs.upload.max-in-flight (100 MB)",
    "upload_threads": "state.changelog.dstl.dfs.upload.num-threads (5)",
    "upload_attempts": "state.changelog.dstl.dfs.upload.max-attempts (3), .retry-policy (fixed)",
    "upload_timeout_s": "state.changelog.dstl.dfs.upload.timeout (1 s)",
    "upload_retry_delay_s": "state.changelog.dstl.dfs.upload.next-attempt-delay (500 ms)",
    "local_directory": "execution.checkpointing.local-backup.dirs",
}

_HEAD: Final = """# Options

Given as `options=statelog.Options(...)`, for each operator. This page is made from the docstrings of the classes.

{options}
## Tuning

Given as `options=statelog.Options(tuning=statelog.Tuning(...))`.

{tuning}"""

_TABLE: Final = """| option | default | meaning | Flink's (its default) |
|---|---|---|---|
"""


def page() -> str:
    """The text of the page."""
    return _HEAD.format(options=_section(Options), tuning=_section(Tuning))


def _section(kind: type[Options | Tuning]) -> str:
    """What the docstring says of all options of a class, and the table of them."""
    text = (inspect.getdoc(kind) or "").partition("\n\nParameters\n")[0]
    shared = text.partition("\n\n")[2].replace("``", "`")
    rows = [
        f"| `{field.name}` | {_default(field)} | {meanings(kind)[field.name]} | {_FLINK.get(field.name, '')} |"
        for field in dataclasses.fields(kind)
    ]
    return f"{shared}\n\n{_TABLE}" + "\n".join(rows) + "\n"


def meanings(kind: type[Options | Tuning]) -> dict[str, str]:
    """What the docstring says of each option of a class, in one line."""
    text = inspect.getdoc(kind) or ""
    parameters = text.partition("Parameters\n----------\n")[2].partition("\n\nRaises\n")[0]
    found = re.findall(r"^(\w+) : .*\n((?:    .*\n?)+)", parameters, re.MULTILINE)
    return {name: " ".join(lines.split()).replace("``", "`").replace("|", "\\|") for name, lines in found}


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    value = field.default
    if field.name.endswith("_bytes") and isinstance(value, int):
        return f"{value >> 20} MiB" if value % (1 << 20) == 0 else f"{value:,}"
    return f"`{value!r}`"


_METRICS: Final = re.compile(r"(?<=<!-- made by docs/tables.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def metrics_page() -> str:
    """The text of the page of metrics, with its table made anew."""
    rows = [_metric(name, one, "counter" if one.adds_up else "gauge") for name, one in exported().items()]
    rows += [_metric(name, one, "histogram") for name, one in distributions().items()]
    table = "\n| name | kind | unit | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n"
    return _METRICS.sub(lambda _: table, METRICS_PAGE.read_text())


def _metric(name: str, meaning: Meaning, kind: str) -> str:
    return f"| `{name}` | {kind} | {meaning.unit} | {meaning.text} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    METRICS_PAGE.write_text(metrics_page())
