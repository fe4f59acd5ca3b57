"""The model that a run is distilled from: ``training.distil_from``, refused before any work, then opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from keyshift.cache_report import load_config
from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError
from keyshift.recipe import Training
from keyshift.start import check_tokenizer

if TYPE_CHECKING:
    from keyshift.modeling import KeyshiftForCausalLM


def teacher_config(training: Training) -> KeyshiftConfig | None:
    """The teacher's configuration in our terms; None without a teacher. Of a folder the headers of the
    weights are read too.

    Raises:
        UserError: no such checkpoint, one that cannot be made into a keyshift model, weights that are missing
            or do not fit.
    """
    from keyshift.convert import ours, plan

    if training.distil_from is None:
        return None
    name = os.path.expanduser(training.distil_from)
    try:
        config = ours(load_config(name))
        if Path(name).is_dir():
            plan(name)
    except UserError as error:
        raise UserError(f"training.distil_from={name!r}: {error}") from error
    return config


def check_teacher(training: Training, config: KeyshiftConfig, sequence_length: int) -> None:
    """Refuse a teacher that a model of ``config`` cannot be compared with.

    Raises:
        UserError: what `teacher_config` refuses; another vocabulary; where attention outputs are compared,
            another hidden size or number of layers; fewer positions than a row of data has.
    """
    teacher = teacher_config(training)
    if teacher is None:
        return
    fields = ["vocab_size"]
    if training.distil_attention > 0:
        fields += ["hidden_size", "num_hidden_layers"]
    for field in fields:
        theirs, own = getattr(teacher, field), getattr(config, field)
        if theirs != own:
            way_out = "" if field == "vocab_size" else ", or training.distil_attention=0"
            raise UserError(
                f"training.distil_from={training.distil_from!r} has {field}={theirs} and the model {own}; "
                f"use the checkpoint that the model was made from{way_out}"
            )
    if teacher.max_position_embeddings < sequence_length:
        raise UserError(
            f"training.distil_from={training.distil_from!r} has max_position_embeddings="
            f"{teacher.max_position_embeddings}, below sequence_length={sequence_length}; use shorter rows"
        )


def open_teacher(name: str, tokenizer: Path | None) -> KeyshiftForCausalLM:
    """The teacher, float32, on the CPU, in evaluation mode.

    Args:
        name: a folder or a hub name, of a keyshift model or of one that `keyshift.convert` knows.
        tokenizer: the folder of the data's, if tokens are words.

    Raises:
        UserError: the teacher's tokenizer is another one, or its weights cannot be read.
    """
    from keyshift.convert import plan
    from keyshift.convert.mechanism import loaded

    where = os.path.expanduser(name)
    check_tokenizer("training.distil_from", where, tokenizer)
    try:
        return loaded(plan(where))
    except UserError as error:
        raise UserError(f"training.distil_from={name!r}: {error}") from error
