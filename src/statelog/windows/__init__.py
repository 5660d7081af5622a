"""Windows on a keyed stream: assigners, aggregates, and the operators that keep and return them."""
