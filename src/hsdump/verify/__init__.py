"""Checks of a store: pure reading, findings, a verdict."""

from hsdump.verify.findings import Finding, Report
from hsdump.verify.verify import VerifyOptions, verify_store

__all__ = ["Finding", "Report", "VerifyOptions", "verify_store"]
