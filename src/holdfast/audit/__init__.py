"""The main job: one bracket of the robust accuracy for each threat, stored as it comes and put into a report."""

from holdfast.audit.bracket import Bracket, Level, Record
from holdfast.audit.files import load_audit
from holdfast.audit.report import render, schema
from holdfast.audit.result import Audit
from holdfast.audit.runner import audit

__all__ = ["Audit", "Bracket", "Level", "Record", "audit", "load_audit", "render", "schema"]
