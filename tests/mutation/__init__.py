"""Mutation testing: small mistakes are planted, one at a time, and the tests should find every one.

cosmic-ray finds the places and keeps what became of each mutant; `operators` says which mistakes are planted. `server`
runs the tests of a mutant in a fork of a process that has imported the packages from outside, so that a mutant costs
about a second; `session` takes one file through all its mutants. `tests.toml` says which tests concern a file, and
`survivors.toml` lists the mutants that no test can kill, each with the invariant that makes it equivalent. README.md
says how to read the report. Files are changed only in a copy below .mutation/.
"""
