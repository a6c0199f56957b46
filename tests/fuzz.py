"""How many cases a fuzz test tries: few where every change is tested, and thousands with  FUZZ=20 pytest -k fuzz"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def examples(count: int) -> settings:
    """Decorates a test that tries `count` cases, or as many times more as the environment's FUZZ says."""
    times = int(os.environ.get("FUZZ", 1))
    return settings(max_examples=count * times, suppress_health_check=[HealthCheck.function_scoped_fixture])
