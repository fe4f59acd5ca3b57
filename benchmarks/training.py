"""What the training engine costs over a plain PyTorch loop.

    python benchmarks/training.py [--rounds 12] [--threads 2]

`keyshift.training.train` (transformers' Trainer with our callbacks) and a loop of a dozen lines train the
same model (every variant of recipes/text.toml: 4 layers, 192 wide) on the same batches (16 x 256 tokens)
with the same optimiser (fused AdamW, decay on all but norms), schedule (cosine with a warm-up) and gradient
clipping; both note the loss every ten steps. Afterwards their weights are compared: if the two did not train
alike, this exits. The engine also notes norm and rate, looks for NaN and spikes, and asks whether to stop.

Mechanisms are trained one after the other, so their tokens/s over GQA's (`tokens_per_second_over_gqa`) are
quotients of separate runs: less certain than the checks.

- The engine owns its loop, so the two cannot be drawn in random order. They alternate instead, step by step:
  the engine's `on_progress` runs one plain step. Each step of either follows one of the other, so both find
  the machine in the same state. The engine's step is all the time between two such calls.
- A round is ten steps of each, so that the engine's logging, every tenth step, falls in every round; the
  value is the median over rounds of plain time / engine time, which is the engine's throughput over the plain
  loop's.
- Random tokens cost next to nothing to draw, which leaves the engine nothing to hide behind. Evaluation and
  checkpoints are left out: they happen after the last step here, and are wanted work, not overhead.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pairing import arguments, at_least, finish, interval, ratio, say
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import get_scheduler
from transformers.utils import logging

from keyshift import KeyshiftForCausalLM
from keyshift.recipe import Training, load_recipe
from keyshift.runs import config_of
from keyshift.training import Progress, train

ROUND = 10
"""Steps of each contender in a round: the engine logs every tenth."""


@dataclass
class RandomTokens:
    """A batch source without structure."""

    vocab_size: int
    sequence_length: int
    tokenizer_path: Path | None = None
    special_tokens: dict[str, int] = field(default_factory=dict)
    fingerprint: str | None = None

    def train_batch(self, seed: int, step: int, batch_size: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        ids = torch.randint(self.vocab_size, (batch_size, self.sequence_length), generator=draw)
        return {"input_ids": ids, "labels": ids}

    def validate(self, model: Any, batch_size: int, batches: int) -> dict[str, float]:
        return {}


def plain_loop(
    model: KeyshiftForCausalLM, source: RandomTokens, settings: Training, seed: int
) -> Iterator[int]:
    """The loop one would write by hand; pauses after every step."""
    vectors = [p for m in model.modules() if isinstance(m, torch.nn.RMSNorm) for p in m.parameters()]
    matrices = [p for p in model.parameters() if not any(p is vector for vector in vectors)]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        fused=True,
    )
    schedule = get_scheduler(settings.schedule, optimizer, settings.warmup_steps, settings.steps)
    model.train()
    losses = []
    for step in range(settings.steps):
        loss = model(**source.train_batch(seed, step, settings.batch_size)).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % ROUND == 0:
            losses.append(loss.item())
        yield step


class Alternation:
    """Takes a plain step after each of the engine's, and times both."""

    def __init__(self, plain: Iterator[int], steps: int):
        self.plain, self.steps = plain, steps
        self.seconds: dict[str, list[float]] = {"engine": [], "plain": []}
        self.resumed = time.perf_counter()

    def __call__(self, progress: Progress) -> None:
        paused = time.perf_counter()
        next(self.plain)
        now = time.perf_counter()
        self.seconds["engine"].append(paused - self.resumed)
        self.seconds["plain"].append(now - paused)
        if progress.step % (5 * ROUND) == 0:
            say(f"step {progress.step} of {self.steps}")
        self.resumed = time.perf_counter()


def alternate(name: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per round of engine and plain loop, for one variant; exits if they did not train alike."""
    rounds, batch, tokens = (2, 2, 32) if options.quick else (options.rounds, 16, 256)
    recipe = load_recipe("text", text_named=False)
    assert recipe.data is not None
    source = RandomTokens(recipe.data.vocab_size, tokens)
    torch.manual_seed(options.seed)
    model = KeyshiftForCausalLM(config_of(recipe.grid()[name], source))
    steps = ROUND * (rounds + 1)  # the first round warms up
    settings = recipe.training.model_copy(
        update={"steps": steps, "batch_size": batch, "eval_steps": steps, "save_steps": steps}
    )
    if model.config.key_map_init == "matched":
        model.match_keys_(source.train_batch(options.seed, 0, batch)["input_ids"])
    by_hand = copy.deepcopy(model)
    alternation = Alternation(plain_loop(by_hand, source, settings, options.seed), steps)
    with tempfile.TemporaryDirectory() as directory:
        train(model, source, settings, Path(directory), seed=options.seed, on_progress=alternation)
    for (weight, ours), plain in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        if not torch.allclose(ours, plain, rtol=1e-3, atol=1e-4):
            off = (ours - plain).abs().max()
            sys.exit(f"{name}: the two loops trained differently: {weight} is off by {off:.1e}")
    say(f"{name}: the two loops trained the same weights")
    return {
        who: [sum(each[i : i + ROUND]) for i in range(ROUND, steps, ROUND)]
        for who, each in alternation.seconds.items()
    }


def main() -> int:
    options = arguments(__doc__, rounds=12).parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    times = {name: alternate(name, options) for name in load_recipe("text", text_named=False).grid()}
    checks, facts = [], {}
    of_gqa = statistics.median(times["GQA"]["engine"])
    for name, each in times.items():
        share = ratio(each["plain"], each["engine"])
        checks.append(at_least(f"{name}: throughput over a plain loop's", share, 0.95))
        seconds = statistics.median(each["engine"])
        facts[name] = {
            "interval": interval(lambda t: ratio(t["plain"], t["engine"]), each),
            "tokens_per_second_over_gqa": of_gqa / seconds,
            "step_seconds": seconds / ROUND,
        }
    return finish(checks, variants=facts, rounds=2 if options.quick else options.rounds)


if __name__ == "__main__":
    sys.exit(main())
