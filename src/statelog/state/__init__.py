"""Keyed state: key groups, codecs, sorted runs, tables, and the handles that a processor uses."""
