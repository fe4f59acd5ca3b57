"""iGSM: problems, their wording, and how solutions are judged."""

from keyshift.tasks.igsm.task import IGSM
from keyshift.tasks.igsm.vocabulary import decode

__all__ = ["IGSM", "decode"]
