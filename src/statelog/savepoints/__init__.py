"""Savepoints: portable copies of all state of a query, as Parquet and a manifest."""
