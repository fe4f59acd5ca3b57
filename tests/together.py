"""What two processes do in the tests of training by several: ``torchrun … tests/together.py OUT``.

Everything in one start of torchrun, since starting is what takes long. The same functions run in the test's
own process, alone, for comparison.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import set_seed

from keyshift import KeyshiftConfig, KeyshiftForCausalLM
from keyshift.errors import RunError, UserError
from keyshift.recipe import Engine, Training
from keyshift.tasks import Induction
from keyshift.training import TaskSource, train

SETTINGS = Training(
    steps=6, batch_size=4, learning_rate=3e-3, eval_steps=3, eval_batches=3, save_steps=100, probe_steps=3
)

MECHANISMS = {
    "gqa": {"attention": "gqa", "shift": "kv"},
    "gva": {"attention": "gva", "shift": "kv", "position": "decoupled_rope", "qk_rope_head_dim": 4},
    "mla": {"attention": "mla", "position": "decoupled_rope", "qk_rope_head_dim": 4, "kv_lora_rank": 8},
}


TAUGHT = SETTINGS.model_copy(
    update={"distil_logits": 0.7, "distil_attention": 0.4, "distil_labels": 0.2, "probe_steps": None}
)


class Uneven(TaskSource):
    """Rows with very different numbers of labels that count: a mean of means is not the mean."""

    def train_batch(self, seed, step, batch_size):
        batch = super().train_batch(seed, step, batch_size)
        tokens = torch.arange(batch["labels"].shape[1])
        kept = tokens[None] >= 14 - 4 * torch.arange(batch_size)[:, None]
        return {**batch, "labels": batch["input_ids"].where(kept, -100)}


def source() -> Uneven:
    return Uneven(Induction(vocab_size=24, sequence_length=16))


def model(mechanism: str = "gqa", seed: int = 0, **fields) -> KeyshiftForCausalLM:
    set_seed(seed)
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["max_position_embeddings"] = 16
    return KeyshiftForCausalLM(KeyshiftConfig(**sizes, **MECHANISMS[mechanism], **fields))


def run(out: Path, mechanism: str, parallel: str, settings: Training = SETTINGS, **options) -> list[dict]:
    engine = Engine(parallel=parallel, micro_batch_size=options.pop("micro_batch_size", None))
    tied = options.pop("tied", False)
    trained = model(mechanism, tie_word_embeddings=tied)
    return train(trained, source(), settings, out, seed=0, engine=engine, **options).history


def teacher(out: Path) -> Training:
    """A teacher for all to learn from, written by the one that starts the processes, and how."""
    if not (out / "teacher").exists():
        model(seed=1).save_pretrained(out / "teacher")
    return TAUGHT.model_copy(update={"distil_from": str(out / "teacher")})


def interrupted(out: Path, parallel: str) -> None:
    """Six steps in two parts: the signal comes to the second process, which is the one that asks."""
    asked = []
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))

    def progress(standing) -> None:
        if standing.step == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    first = train(
        model("gva"),
        source(),
        SETTINGS,
        out,
        seed=0,
        engine=Engine(parallel=parallel),
        stop=lambda: bool(asked),
        on_progress=progress,
    )
    assert first.interrupted
    assert first.steps == 4
    assert (out / "checkpoint-4").is_dir()
    run(out, "gva", parallel, resume=True)


def refused(**engine) -> str:
    try:
        train(model(), source(), SETTINGS, Path("unused"), seed=0, engine=Engine(**engine))
    except (UserError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    histories = {}
    for parallel in ("ddp", "fsdp"):
        for mechanism in MECHANISMS:
            name = f"{parallel}-{mechanism}"
            histories[name] = run(out / name, mechanism, parallel)
        name = f"{parallel}-micro"
        histories[name] = run(out / name, "gva", parallel, micro_batch_size=1)
        interrupted(out / f"{parallel}-parts", parallel)
        run(out / f"{parallel}-tied", "gqa", parallel, tied=True)
        zclip = SETTINGS.model_copy(update={"clipping": "zclip", "spike_zscore": 6.0})
        name = f"{parallel}-taught"
        micro = 1 if parallel == "ddp" else None
        histories[name] = run(out / name, "gva", parallel, teacher(out), micro_batch_size=micro)
        histories[f"{parallel}-zclip"] = run(out / f"{parallel}-zclip", "gva", parallel, zclip)
    messages = {
        "processes": refused(processes=3),
        "micro": refused(micro_batch_size=3),
        "resumed otherwise": refused_resume(out),
    }
    if os.environ["RANK"] == "0":
        (out / "together.json").write_text(json.dumps({"histories": histories, "messages": messages}))


def refused_resume(out: Path) -> str:
    try:
        run(out / "ddp-gqa", "gqa", "fsdp", resume=True)
    except UserError as error:
        return f"UserError: {error}"
    return "trained"


if __name__ == "__main__":
    main()
