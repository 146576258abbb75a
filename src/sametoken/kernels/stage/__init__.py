"""Stage: flat rows of a step from committed lengths and drafts."""
