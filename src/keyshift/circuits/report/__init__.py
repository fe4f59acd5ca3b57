"""The report of an analysis of circuits: ``circuits.json``, a self-contained page, terminal."""

from keyshift.circuits.report.files import write_circuits
from keyshift.circuits.report.patterns import Patterns
from keyshift.circuits.report.terminal import print_circuits, summary

__all__ = ["Patterns", "print_circuits", "summary", "write_circuits"]
