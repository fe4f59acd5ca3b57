"""Circuits: find, measure and break the heads that complete repeats, in any causal language model.

Small functions over a `CircuitModel`; `analyse` puts them together. Shifted and reconstructed keys are read
by their effective matrices (`layer_weights`), patterns from the model's own attention calls.
"""

from keyshift.circuits.ablation import ablate, ablating, heads_of_key_head, mean_results
from keyshift.circuits.analysis import analyse
from keyshift.circuits.composition import composition, random_composition
from keyshift.circuits.effect import head_effects
from keyshift.circuits.eigen import Vocabulary, positivity
from keyshift.circuits.lift import lift
from keyshift.circuits.loading import load_model, shipped_models
from keyshift.circuits.model import CircuitModel
from keyshift.circuits.prompt import read_prompt
from keyshift.circuits.repeats import Repeats, prediction_losses, sample_repeats
from keyshift.circuits.scores import head_scores, patterns, value_flow, value_weighted
from keyshift.circuits.shifted import correlations, quadrants
from keyshift.circuits.streams import read_streams
from keyshift.circuits.study import Settings
from keyshift.circuits.toy import toy_circuit
from keyshift.circuits.weights import layer_weights

__all__ = [
    "CircuitModel",
    "Repeats",
    "Settings",
    "Vocabulary",
    "ablate",
    "ablating",
    "analyse",
    "composition",
    "correlations",
    "head_effects",
    "head_scores",
    "heads_of_key_head",
    "layer_weights",
    "lift",
    "load_model",
    "mean_results",
    "patterns",
    "positivity",
    "prediction_losses",
    "quadrants",
    "random_composition",
    "read_prompt",
    "read_streams",
    "sample_repeats",
    "shipped_models",
    "toy_circuit",
    "value_flow",
    "value_weighted",
]
