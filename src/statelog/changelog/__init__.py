"""The changelog of a subtask: changesets, where they are stored, and local copies of them."""
