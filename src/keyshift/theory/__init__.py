"""The theorems of the papers, checked numerically in float64: ``keyshift theory``.

One idea per file, each a few pure functions; attention is that of this package, with weights set by hand.
"""

from keyshift.theory.flow import descent, landscape
from keyshift.theory.learning import Weights, limit_logits, limit_loss, module_loss
from keyshift.theory.machine import induction_heads
from keyshift.theory.one_layer import shifted_keys
from keyshift.theory.order import both_orders
from keyshift.theory.results import TheoryReport
from keyshift.theory.simulation import finite_loss, random_gram
from keyshift.theory.two_layers import smear_and_match

__all__ = [
    "TheoryReport",
    "Weights",
    "both_orders",
    "descent",
    "finite_loss",
    "induction_heads",
    "landscape",
    "limit_logits",
    "limit_loss",
    "module_loss",
    "random_gram",
    "shifted_keys",
    "smear_and_match",
]
