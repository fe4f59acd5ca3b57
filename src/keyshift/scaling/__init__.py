"""Scaling laws: the loss of comparisons against the size of their models, one curve per variant."""

from keyshift.scaling.command import fit_scaling
from keyshift.scaling.law import fit
from keyshift.scaling.points import read_curves
from keyshift.scaling.results import Curve, Estimate, Law, ScalingReport, Size
from keyshift.scaling.terminal import print_scaling, summary

__all__ = [
    "Curve",
    "Estimate",
    "Law",
    "ScalingReport",
    "Size",
    "fit",
    "fit_scaling",
    "print_scaling",
    "read_curves",
    "summary",
]
