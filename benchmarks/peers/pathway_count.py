"""The count by key on Pathway, whose number of threads is in PATHWAY_THREADS; it waits for new files until killed."""

import sys

import pathway as pw

source, output, checkpoint, checkpoint_s = sys.argv[1:]

# Without a limit all files that are there at the start are one step of the computation.
lines = pw.io.plaintext.read(source, mode="streaming", name="lines", max_backlog_size=1_000_000)
counts = lines.groupby(pw.this.data).reduce(pw.this.data, n=pw.reducers.count())
pw.io.csv.write(counts, f"{output}/counts.csv")
pw.run(
    monitoring_level=pw.MonitoringLevel.NONE,
    persistence_config=pw.persistence.Config(
        pw.persistence.Backend.filesystem(checkpoint),
        snapshot_interval_ms=round(float(checkpoint_s) * 1000),
    ),
)
