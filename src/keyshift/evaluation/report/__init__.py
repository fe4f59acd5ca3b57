"""The report of an evaluation: ``eval.json``, ``eval.md``, tables for the terminal."""

from keyshift.evaluation.report.files import write_eval
from keyshift.evaluation.report.terminal import print_eval
from keyshift.evaluation.report.values import summary

__all__ = ["print_eval", "summary", "write_eval"]
