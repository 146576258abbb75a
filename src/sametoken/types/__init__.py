"""Plain Python values shared by every layer above: requests, plans, results, parameters."""
