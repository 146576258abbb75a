"""Settings of tests over random examples, beside those of tests/conftest.py."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

#: The same examples in every run; a test's fixtures serve all of them.
FIXED = settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
