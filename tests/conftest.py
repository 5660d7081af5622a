"""Settings for all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite(
    "statelog.testing.log_contract", "statelog.testing.store_contract", "statelog.testing.table_contract"
)

# Time limits per example would make tests depend on what else the machine does.
settings.register_profile("statelog", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("statelog")
