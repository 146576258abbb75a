"""One folder per operation, each with its reference beside it."""
