"""For tests: of processors, without Spark, and of what implements statelog's contracts."""

from statelog.testing.faults import FaultPlan
from statelog.testing.harness import Harness, HarnessSnapshot
from statelog.testing.tws_tester import TwsTester

__all__ = ["FaultPlan", "Harness", "HarnessSnapshot", "TwsTester"]
