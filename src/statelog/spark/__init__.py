"""What ties it to Spark: the plan, the workers' entry, calls to the driver, rewinding."""
