"""Sums of the ranks' partial products: in rank order, rounded once."""
