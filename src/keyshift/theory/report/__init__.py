"""The report of the theory: ``theory.json``, a self-contained page, figures, terminal."""

from keyshift.theory.report.files import write_theory
from keyshift.theory.report.terminal import print_theory, summary

__all__ = ["print_theory", "summary", "write_theory"]
