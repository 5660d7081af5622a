"""Sinks that get every row of a statelog query exactly once, whatever is killed and when.

``postgres``, ``sqlite``, ``delta``, ``iceberg`` and ``files`` are the recipes: a class each, to be copied.
``docs/sinks.md`` has their common parts and conditions. The other modules are their proof: ``job`` has a query for
each sink, ``targets`` makes and reads what the sinks write to, ``server`` runs PostgreSQL, ``kills`` kills the job.

``kafka`` is for ``statelog.write_ahead`` and needs the package confluent-kafka; ``tests/kafka`` has its proof.

    python -m examples.sinks postgres sqlite delta iceberg files --kills 100
"""
