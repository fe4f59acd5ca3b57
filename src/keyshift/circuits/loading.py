"""Models by name: those that ship with the package, checkpoints on disk and on the hub, TransformerLens'."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from keyshift.cache_report import load_config
from keyshift.checkpoint import errors_only, load_strictly, tokenizer_of
from keyshift.circuits.model import CircuitModel
from keyshift.errors import UserError, first_line

MODELS = Path(__file__).parent / "models"
SHIPPED = ("two-layer", "one-layer-shift")

LENS_NAMES = re.compile(
    r"(neelnanda|arthurconmy|baidicoot)/.+|(attn-only|gelu|solu)-(\d+l|demo)(-.+)?|redwood_attn_2l|othello-gpt",
    re.IGNORECASE,
)
"""TransformerLens' own checkpoints on the hub: their repositories, and what TransformerLens calls them."""
LENS_KEYS = {"n_layers", "d_model", "d_head", "n_heads", "n_ctx", "d_vocab"}
LENS_FIELDS = {
    *LENS_KEYS,
    *("d_mlp", "d_vocab_out", "act_fn", "attn_only", "gated_mlp", "normalization_type", "final_rms", "eps"),
    *("n_key_value_heads", "use_attn_scale", "attn_scale", "attn_scores_soft_cap", "output_logits_soft_cap"),
    *("positional_embedding_type", "rotary_dim", "rotary_base", "rope_scaling", "attention_dir"),
}
"""What a configuration may say that TransformerLens' native model follows."""
LENS_FOREIGN = (
    *("shortformer_pos", "parallel_attn_mlp", "use_local_attn", "scale_attn_by_inverse_layer_idx"),
    *("post_embedding_ln", "use_normalization_before_and_after", "use_qk_norm", "num_experts"),
)
"""What TransformerLens' former models could do; its native model would compute something else in silence."""


def shipped_models() -> dict[str, Path]:
    """The models that ship with the package: name and folder."""
    return {name: MODELS / name for name in SHIPPED if (MODELS / name / "config.json").exists()}


def load_model(name_or_path: str) -> CircuitModel:
    """A causal language model opened for measurement, on the CPU, with its tokenizer if it has one.

    Args:
        name_or_path: in this order, a model of `shipped_models`; a folder with a transformers checkpoint
            (ours or any) or one of TransformerLens (its ``config.json`` and one ``*.pth`` state dict); the
            name of one of TransformerLens' own checkpoints, such as ``attn-only-2l``; the name of a
            transformers model on the hub.

    Raises:
        UserError: nothing there, or no network; a damaged, incomplete or misfitting checkpoint or tokenizer;
            a model that is not a causal language model, or that needs code from its repository;
            TransformerLens needed but not installed; what `CircuitModel` refuses.
    """
    shipped = shipped_models().get(name_or_path)
    folder = shipped or Path(name_or_path).expanduser()
    with _quiet(), _named(name_or_path):
        if name_or_path and folder.is_dir():
            lens = _lens_config(folder)
            found = _of_transformers(str(folder)) if lens is None else _of_lens(folder, lens)
        elif folder.exists() or folder.is_absolute() or name_or_path.startswith((".", "~")):
            what = "not a folder" if folder.exists() else "no such folder"
            raise UserError(f"model={name_or_path!r}: {what}; pass the folder of a checkpoint, or a hub name")
        elif LENS_NAMES.fullmatch(name_or_path):
            found = _of_lens_hub(name_or_path)
        else:
            found = _of_transformers(name_or_path)
        model = CircuitModel(*found, name=name_or_path)
    if folder.is_dir():
        model.name = folder.resolve().name  # the path served to say what is wrong with it
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings and no progress bars of transformers: what matters of them is an error here."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with errors_only():
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Whatever goes wrong inside as one line about this model."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever other libraries make of foreign files
        raise UserError(f"model={name!r} cannot be loaded: {first_line(error)}") from error


def _of_transformers(name: str) -> tuple[Any, Any]:
    """A transformers model and its tokenizer."""
    model = load_strictly(
        AutoModelForCausalLM.from_pretrained,
        name,
        config=load_config(name),
        dtype="auto",
        trust_remote_code=False,
        refused=("missing_keys", "mismatched_keys"),
    )
    return model, tokenizer_of(name)


def _lens_config(folder: Path) -> dict[str, Any] | None:
    """The configuration in a folder if it is one of TransformerLens'."""
    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None  # transformers will say what is wrong with it
    is_lens = isinstance(content, dict) and "model_type" not in content and content.keys() >= LENS_KEYS
    return content if is_lens else None


def _of_lens_hub(name: str) -> tuple[Any, Any]:
    """One of TransformerLens' own checkpoints, from the hub or its cache on this machine."""
    bridge_class = _bridge_class(name)
    from transformer_lens.supported_models import get_official_model_name

    repository = name if "/" in name else get_official_model_name(name)
    folder = Path(snapshot_download(repository, allow_patterns=["config.json", "*final.pth"]))
    config = _lens_config(folder)
    if config is None:
        return _of_transformers(repository)
    if "_old" in repository or config.get("architecture") == "mingpt":
        # Weights lie another way round, and TransformerLens knows how; it needs the network for it.
        return bridge_class.boot_tl_legacy(repository), _lens_tokenizer(folder, config)
    return _of_lens(folder, config)


def _of_lens(folder: Path, config: dict[str, Any]) -> tuple[Any, Any]:
    """A checkpoint of TransformerLens: a bridge around its native model, and the tokenizer."""
    bridge_class = _bridge_class(str(folder))
    from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

    bridge = bridge_class.boot_native({**_native_fields(config), "init_weights": False})
    weights = _lens_weights(folder)
    if "embed.W_E" in weights:
        if bridge.cfg.positional_embedding_type != "standard":
            raise UserError(
                f"{folder}: rotary positions in TransformerLens' former layout, but its native model rotates "
                "other pairs; use a checkpoint with learned positions"
            )
        weights = convert_tl_checkpoint(weights, bridge.cfg)
    weights.setdefault("unembed.bias", torch.zeros(bridge.cfg.d_vocab))  # several have none
    try:
        bridge.load_state_dict(weights, strict=True)
    except RuntimeError as error:  # says what in its second line
        said = (str(error).splitlines()[1:] or [first_line(error)])[0].strip()[:200]
        raise UserError(f"the weights in {folder} do not fit its config.json: {said}") from error
    return bridge, _lens_tokenizer(folder, config)


def _bridge_class(name: str) -> Any:
    """TransformerLens' class for loading."""
    try:
        import transformer_lens.model_bridge.sources  # noqa: F401  (gives the class its boot functions)
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as error:
        raise UserError(f"model={name!r} needs TransformerLens: pip install 'keyshift[tl]'") from error
    return TransformerBridge


def _native_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration for TransformerLens' native model."""
    foreign = [name for name in LENS_FOREIGN if config.get(name)]
    if foreign:
        raise UserError(
            f"{foreign[0]}={config[foreign[0]]!r}: TransformerLens' native model does not do that; use "
            "another checkpoint"
        )
    fields = {name: value for name, value in config.items() if name in LENS_FIELDS}
    if "normalization" in config:  # as the first checkpoints call it
        fields["normalization_type"] = config["normalization"]
    return fields


def _lens_weights(folder: Path) -> dict[str, Tensor]:
    """The one state dict in a folder, or the final one, in float32."""
    files = sorted(folder.glob("*.pth"))
    files = [file for file in files if file.name.endswith("final.pth")] or files
    if len(files) != 1:
        raise UserError(f"{folder} has {len(files)} *.pth files: keep one, or call one *final.pth")
    weights = torch.load(files[0], map_location="cpu", weights_only=True)
    return {name: tensor.float() for name, tensor in weights.items()}


def _lens_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """The tokenizer in the folder, else the one that the configuration names; None without either."""
    own, name = tokenizer_of(str(folder)), config.get("tokenizer_name")
    if own is not None or name is None:
        return own
    named = tokenizer_of(name)
    if named is None:
        raise UserError(
            f"tokenizer_name={name!r} in {folder}/config.json: no such tokenizer here or on the hub; put its "
            "files into the folder, or take the name away"
        )
    return named
