"""What becomes of a Python value in a field of a Spark type: Spark's answers, kept as data, and statelog's beside them.

``cases`` has the types, the values, and the processors that try them; ``spark`` asks Spark and writes its answers to
``spark-4.3.txt``; ``statelog`` asks statelog; ``test_conversions`` compares the two. Where they differ,
``differences.toml`` has the reason, and docs/conversions.md is printed from all three.
"""
