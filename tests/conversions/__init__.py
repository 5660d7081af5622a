"""What becomes of a Python value in a field of a Spark type: Spark's answers, kept as data, and statelog's beside them.

``cases`` has the types and values, ``probes`` the processors that try them. ``spark`` asks Spark and writes its answers
to ``spark-4.3*.txt``; ``statelog_answers`` asks statelog and writes ``statelog.txt``. Where they differ,
``differences.toml`` has the reason; ``page`` prints docs/conversions.md from all three.
"""
