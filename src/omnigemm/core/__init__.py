"""What every operation and every backend shares: the problem, the plan, the dispatch, the errors."""
