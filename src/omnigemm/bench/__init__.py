"""Measure and verify: the workloads, the timing method and the records that the command line and the drivers share."""
