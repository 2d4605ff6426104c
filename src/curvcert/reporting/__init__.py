"""Reports of results: a page for a person, its data as JSON, and pictures."""

from curvcert.reporting.accuracy import draw_accuracy
from curvcert.reporting.collecting import report_data
from curvcert.reporting.comparison import Comparison, compare
from curvcert.reporting.data import ReportData
from curvcert.reporting.page import render
from curvcert.reporting.witnesses import draw_witnesses
from curvcert.reporting.writing import report, write_report

__all__ = [
    "Comparison",
    "ReportData",
    "compare",
    "draw_accuracy",
    "draw_witnesses",
    "render",
    "report",
    "report_data",
    "write_report",
]
