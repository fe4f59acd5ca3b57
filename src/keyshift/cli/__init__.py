"""The command line: parses, calls, prints. Everything slow is imported inside the commands."""

from keyshift.cli import compare, convert, data, evaluate, generate, models, push, scaling, studies, train  # noqa: F401  # each registers its commands with the app
from keyshift.cli.app import app, main

__all__ = ["app", "main"]
