"""The main job: one model, one threat, one bracket of its robust accuracy, stored as it comes and put into a report."""

from holdfast.audit.files import load_audit
from holdfast.audit.report import render
from holdfast.audit.result import Audit, Level, Record
from holdfast.audit.runner import audit

__all__ = ["Audit", "Level", "Record", "audit", "load_audit", "render"]
