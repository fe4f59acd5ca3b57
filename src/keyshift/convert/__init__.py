"""Checkpoints in and out: other libraries' decoders as keyshift models and back, the shift put in."""

from keyshift.convert.architectures import ARCHITECTURES, ours, theirs
from keyshift.convert.conversion import Plan, convert, plan
from keyshift.convert.files import check_new

__all__ = ["ARCHITECTURES", "Plan", "check_new", "convert", "ours", "plan", "theirs"]
