"""``python -m keyshift.cli`` is ``keyshift``."""

from keyshift.cli import main

main()
