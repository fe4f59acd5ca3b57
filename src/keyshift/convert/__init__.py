"""Checkpoints in and out: other libraries' decoders as keyshift models and back, the shift put in."""

from keyshift.convert.architectures import ARCHITECTURES, ours, theirs
from keyshift.convert.conversion import Plan, check_new, convert, plan

__all__ = ["ARCHITECTURES", "Plan", "check_new", "convert", "ours", "plan", "theirs"]
