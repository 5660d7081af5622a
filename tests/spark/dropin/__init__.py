"""The same processors on Spark's own operator and on statelog's."""
