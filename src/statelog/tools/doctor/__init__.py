"""Checks, before a query runs, that an application can run stateful operators: on its driver and on its executors.

Every check ends in a finding, whatever happens: a failure, a time limit, a task that Spark could not run.

The life of a diagnosis:

1. `doctor` has the order of the checks.
2. `settings` makes a session for the command, and judges the application's settings; `versions` compares interpreters
   and packages.
3. On the driver, `location` tries out the store and leaves an object for the executors to see.
4. `executors` brings a task to each executor. It runs `executor_work`, which connects to the driver, compares the
   clocks and tries the folder of the local copies; `location` tries the store.
5. The driver compares the executors' reports, and removes everything that was written.

Words of this package:

- finding (`finding`): the result of one check in one place, with a level and a remedy.
- probe: the folder below a location in which a diagnosis writes.
- marks: what an executor has left in that folder, for the driver to compare.

Checks are generators that run in threads, each within a time limit (`finding`); a check that is asked to end is closed,
and so removes what it has written. May import `spark` and all packages below it.
"""
