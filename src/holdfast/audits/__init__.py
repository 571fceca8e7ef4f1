"""The main job: one bracket of the robust accuracy for each threat, stored as it comes and put into a report."""

from holdfast.audits.bracket import Bracket, Level, Record
from holdfast.audits.report.page import render, schema
from holdfast.audits.result import Audit
from holdfast.audits.runner import audit
from holdfast.audits.saved import load_audit

__all__ = ["Audit", "Bracket", "Level", "Record", "audit", "load_audit", "render", "schema"]
