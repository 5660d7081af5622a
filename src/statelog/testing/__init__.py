"""Tools for testing processors without Spark, and conformance tests of stores.

`Harness` runs a query with one operator in plain Python: no session, no JVM, milliseconds per batch. It is not an
imitation: it runs the real coordinator, log, tasks, local runs and tables. `TwsTester` offers the interface of
Spark's tester on the same base. docs/testing.md is the page for users.

A harness works like this:

1. `rows` has the test's description of the operator. `keyed` or `unkeyed` checks it and builds the operator that a
   Spark worker would run; they, `rows` and `convert.ddl` replace the JVM's part in this.
2. `query` plays the driver, its hosts and their Python workers in this process. As Spark does, it runs batch after
   batch, retries tasks, repeats a batch if the driver dies, and starts the query again at any parallelism. On demand
   a process dies at a step of a batch; `faults` makes store calls fail before or after their effect.
3. `state_view` reads a key's state from the newest checkpoint, as a new host would.

Apart from that, `contracts` has the conformance tests of a store, which the tests of an implementation subclass, and
`query` has a clock that a test advances.

Words:

- host: a local directory. A start keeps its hosts, or begins on new ones without local files.
- start: one start of the query, with a new run id, a new coordinator and new workers.
- death: the effect of the next crash, that is, whether the driver dies and how the query starts again.
- stand-in: a number in a column in place of a test's own object (`tws_tester`).

May import every package. Production packages do not import this one, and `contracts` alone needs pytest.
"""

from statelog.testing.faults import FaultPlan
from statelog.testing.harness import Harness, HarnessSnapshot
from statelog.testing.tws_tester import TwsTester

__all__ = ["FaultPlan", "Harness", "HarnessSnapshot", "TwsTester"]
