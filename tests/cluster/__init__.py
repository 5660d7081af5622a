"""A query on several hosts of one machine, which are harmed: it must go on, and its results must be exact.

``python -m tests.cluster`` does one harm after the other, and prints how long it takes until the next batch is there.
``hosts`` makes hosts of namespaces and knows nothing of Spark; ``spark_hosts`` starts Spark and an S3 server on them;
``life`` runs the query, measures, and compares with the model in ``totals``; ``harms`` is the list of what happens.
"""
