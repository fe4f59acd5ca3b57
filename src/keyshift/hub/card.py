"""Model cards: what the folder of a checkpoint says about it, and no number that was not measured."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from keyshift.cache import cache_bytes_per_token
from keyshift.configuration import KeyshiftConfig
from keyshift.convert.architectures import BASE_MODEL, ORIGIN
from keyshift.hub.contents import Contents, read_contents
from keyshift.hub.measured import Measured
from keyshift.hub.trained import Trained, trained
from keyshift.hub.wording import mechanism, same_heads

TEMPLATE = Path(__file__).with_name("card.md.j2")
TRANSFORMERS = "5.16"
"""The oldest transformers that the carried code runs with: that of pyproject.toml."""
LICENCES = {"Apache License Version 2.0": "apache-2.0", "MIT License": "mit"}
"""How the texts of licences begin, white space apart, and what the hub calls them."""
SEAL = "<!-- keyshift push {digest} -->\n"


def model_card(
    folder: Path, *, repo: str | None = None, scores: Sequence[Measured] = (), remote_code: bool = True
) -> str:
    """The README.md of a checkpoint's folder: front matter, mechanism, cache, training, results, loading.

    Args:
        repo: as the examples call it; None is the folder's name.
        scores: of this checkpoint, see `keyshift.hub.measured.read_scores`.
        remote_code: whether the code goes along.

    Raises:
        UserError: what `keyshift.hub.contents.read_contents` refuses.
    """
    return card_of(read_contents(folder), repo or folder.resolve().name, scores, remote_code)


def card_of(contents: Contents, repo: str, scores: Sequence[Measured], remote_code: bool) -> str:
    """As `model_card`, of a folder that was read."""
    from huggingface_hub import ModelCard, ModelCardData

    config, history = contents.config, trained(contents.folder)
    tags = ["keyshift", config.attention.replace("_", "-")]
    data = ModelCardData(
        library_name="transformers" if remote_code else "keyshift",
        pipeline_tag="text-generation",
        license=_license(contents.folder),
        base_model=getattr(config, BASE_MODEL, None),
        datasets=_datasets(history),
        tags=tags + ["kv-shifting"] * (config.shift != "none"),
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=repo.rsplit("/", 1)[-1],
        repo=repo,
        mechanism=mechanism(config),
        parameters=contents.parameters,
        cache=_cache(config),
        converted_from=getattr(config, ORIGIN, None),
        base_model=getattr(config, BASE_MODEL, None),
        training=_training(history),
        heldout=_heldout(history),
        scores=scores,
        remote_code=remote_code,
        transformers=TRANSFORMERS,
    )
    return _sealed(str(card).rstrip() + "\n")


def is_untouched(card: str) -> bool:
    """Whether a card is one of ours as it was written: it may be replaced by a newer one."""
    text, _, _ = card.rpartition("<!-- keyshift push ")
    return bool(text) and card == _sealed(text.removesuffix("\n"))


def _sealed(text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text}\n{SEAL.format(digest=digest)}"


def _license(folder: Path) -> str | None:
    """What the hub calls the licence in the folder; None if there is none, or it is another."""
    for path in sorted(folder.glob("LICENSE*")):
        start = " ".join(path.read_text(errors="replace")[:400].split())
        for beginning, name in LICENCES.items():
            if start.startswith(beginning):
                return name
    return None


def _datasets(history: Trained | None) -> list[str] | None:
    data = None if history is None or history.recipe is None else history.recipe.data
    return None if data is None or data.dataset is None else [data.dataset]


def _cache(config: KeyshiftConfig) -> str:
    own = cache_bytes_per_token(config, torch.bfloat16)
    same = same_heads(config)
    grouped = cache_bytes_per_token(same, torch.bfloat16)
    what = {1: "MQA", same.num_attention_heads: "MHA"}.get(same.num_key_value_heads, "GQA")
    text = f"{own:,} bytes per token in bfloat16"
    return (
        text
        if own == grouped
        else f"{text}; {what} with these heads: {grouped:,} ({own / grouped:.3f} of it)"
    )


def _training(history: Trained | None) -> list[str]:
    """What is known of it, a line each."""
    if history is None:
        return []
    lines = []
    recipe, variant = history.recipe, history.variant
    if recipe is not None and variant is not None:
        lines.append(f"recipe “{recipe.title}”, variant “{variant.name}”, seed {history.seed}")
    lines += _data_lines(history)
    lines.append(f"{history.step:,} optimiser steps{_size(history)}")
    if variant is not None:
        each = variant.training
        warm = f" after a warm-up of {each.warmup_steps:,} steps" if each.warmup_steps else ""
        lines.append(
            f"AdamW, learning rate {each.learning_rate:g} ({each.schedule}{warm}), "
            f"weight decay {each.weight_decay:g}"
        )
        if each.trained == "shift":
            lines.append("the weights of the shift alone were trained")
        if each.distil_from is not None:  # whose name may be a path
            lines.append(
                f"distilled from a teacher: KL of logits × {each.distil_logits:g}, error of attention "
                f"outputs × {each.distil_attention:g}, cross-entropy of labels × {each.distil_labels:g}"
            )
    if history.result is not None:
        where = history.result.environment
        known = [f"{name} {where[name]}" for name in ("keyshift", "torch", "transformers") if name in where]
        lines.append(", ".join([*known, *([where["device"]] if "device" in where else [])]))
    return [line for line in lines if line]


def _data_lines(history: Trained) -> list[str]:
    """The task, the data set by its name on the hub, or that it was text: paths are nobody's business."""
    recipe, variant = history.recipe, history.variant
    if recipe is None or variant is None:
        return []
    lines = []
    if recipe.data is not None:
        lines.append(f"data set {recipe.data.dataset}" if recipe.data.dataset else "text")
    if variant.task is not None:
        lines.append(f"synthetic task `{variant.task['name']}`")
    return lines


def _size(history: Trained) -> str:
    """Sequences and tokens, where the run says."""
    variant = history.variant
    if variant is None:
        return ""
    size = f" of {variant.training.batch_size:,} sequences"
    if history.result is not None and history.result.curve:
        last = history.result.curve[-1]
        if last.step == history.step:
            return f"{size}, {last.tokens:,} tokens"
    return size


def _heldout(history: Trained | None) -> dict[str, str]:
    if history is None:
        return {}
    found = history.heldout
    rows = {}
    if "loss" in found:
        rows["loss, nats per predicted token"] = f"{found['loss']:.4f}"
    if "bits_per_byte" in found:  # which text alone has
        rows["perplexity"] = f"{math.exp(found['loss']):.3f}"
        rows["bits per byte"] = f"{found['bits_per_byte']:.4f}"
    if "accuracy" in found:
        rows["accuracy"] = f"{found['accuracy']:.4f}"
    if history.result is not None:
        rows |= {name: f"{value:.4f}" for name, value in history.result.scores.items()}
    return rows
