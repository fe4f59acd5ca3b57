"""The report of a comparison: ``report.json``, figures, a self-contained page, Markdown, the terminal."""

from keyshift.report.files import write_report
from keyshift.report.numbers import summary_rows
from keyshift.report.terminal import print_summary

__all__ = ["print_summary", "summary_rows", "write_report"]
