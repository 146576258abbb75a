"""Drafters, one file per method, and how a config becomes one."""
