"""What watching costs: head scores of a model the size of GPT-2 small, against its plain forward passes.

    python benchmarks/circuits.py [--rounds 5] [--threads 2] [--sequences 100]

GPT-2 small with random weights, float32, 100 sequences of [BOS] + 50 + 50 tokens; all four scores of 144
heads.

- plain: the same sequences in the same batches through the transformers model, logits and all.
- hidden: the same without logits, which scores do not need: what watching adds shows best against this.
- watched: `keyshift.circuits.head_scores`.
- eager, without a bar: what one would do otherwise, ``attn_implementation="eager"`` and
  ``output_attentions=True``, and the same scores taken from the patterns that it returns, batch by batch.
- Times are medians of the ratios of paired rounds. Memory is the peak resident growth of each in a process of
  its own (Linux: /proc), over what is resident when the model is built and has run once.
- long: a 4,096-token sequence through the same architecture with room for it; it has to work, its memory is
  shown.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from memory import reset_peak, resident
from pairing import arguments, at_most, finish, interval, ratio, say, timed
from transformers import GPT2Config, GPT2LMHeadModel

from keyshift.circuits import CircuitModel, head_scores, sample_repeats
from keyshift.circuits.repeats import Repeats, in_batches

PERIOD = 50
LONG = 4096
SIZES = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}
QUICK = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 500}
MEGABYTE = 1e6


def build(sizes: dict[str, int], seed: int, attention: str = "sdpa", positions: int = 1024) -> CircuitModel:
    torch.manual_seed(seed)
    config = GPT2Config(**sizes, n_positions=positions, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = attention
    return CircuitModel(GPT2LMHeadModel(config).eval(), name=attention)


def contenders(fused: CircuitModel, eager: CircuitModel, sequences: int) -> dict[str, Callable[[], object]]:
    repeats = sample_repeats(fused, period=PERIOD, sequences=sequences)

    def plain() -> None:
        for ids, _ in in_batches(repeats.ids_ST, None):
            fused.logits(ids)

    def hidden() -> None:
        for ids, _ in in_batches(repeats.ids_ST, None):
            fused.watch(ids)

    return {
        "plain": plain,
        "hidden": hidden,
        "watched": lambda: head_scores(fused, repeats),
        "eager": lambda: scores_from_all_patterns(eager, repeats),
    }


@torch.no_grad()
def scores_from_all_patterns(model: CircuitModel, repeats: Repeats) -> torch.Tensor:
    """Previous-token, induction, duplicate- and first-token scores [4, layers, heads], the usual way."""
    sums = []
    for ids, _ in in_batches(repeats.ids_ST, None):
        attentions = model.module.transformer(ids, output_attentions=True, use_cache=False).attentions
        patterns = torch.stack(attentions)
        late = slice(repeats.period, None)
        sums.append(
            torch.stack(
                [
                    patterns.diagonal(-1, -2, -1).mean(-1).sum(1),
                    patterns.diagonal(1 - repeats.period, -2, -1)[..., 2:].mean(-1).sum(1),
                    patterns.diagonal(-repeats.period, -2, -1)[..., late].mean(-1).sum(1),
                    patterns[..., 1:, 0].mean(-1).sum(1),
                ]
            )
        )
    return torch.stack(sums).sum(0) / len(repeats.ids_ST)


def growth(name: str, sizes: dict[str, int], seed: int, sequences: int, threads: int) -> int:
    """Peak resident bytes of one contender over those before it, in this process."""
    torch.set_num_threads(threads)
    if name == "long":
        model = build(sizes, seed, positions=LONG)
        ids = torch.randint(1, model.vocabulary, (1, LONG))
        head_scores(model, ids[:, :64])

        def run() -> object:
            return head_scores(model, ids)
    else:
        model = build(sizes, seed, "eager" if name == "eager" else "sdpa")
        contenders(model, model, 2)[name]()
        run = contenders(model, model, sequences)[name]
    before = resident("VmRSS")
    reset_peak()
    run()
    return resident("VmHWM") - before


def main() -> int:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--sequences", type=int, default=100, help="of 101 tokens (default: %(default)s)")
    options = parser.parse_args()
    sizes, sequences = (QUICK, 4) if options.quick else (SIZES, options.sequences)
    torch.set_num_threads(options.threads)
    peaks = {}
    for name in ("plain", "hidden", "watched", "eager", "long"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            peaks[name] = pool.submit(growth, name, sizes, options.seed, sequences, options.threads).result()
        say(f"{name}: peak growth {peaks[name] / MEGABYTE:.0f} MB")
    times = timed(
        contenders(build(sizes, options.seed), build(sizes, options.seed, "eager"), sequences),
        rounds=options.rounds,
        seed=options.seed,
        label="scores",
        warmup=1,
    )
    against = {name: ratio(times["watched"], times[name]) for name in ("plain", "hidden", "eager")}
    for name, value in against.items():
        low, high = interval(lambda t, name=name: ratio(t["watched"], t[name]), times)
        say(f"watched over {name}: {value:.3f} ({low:.3f} to {high:.3f})")
    extra = (peaks["watched"] - peaks["hidden"]) / MEGABYTE
    return finish(
        [
            at_most("time of head scores over plain forward passes", against["plain"], 1.3),
            at_most("time of head scores over forward passes without logits", against["hidden"], 1.3),
            at_most("peak memory over forward passes without logits, MB", extra, 200),
        ],
        over_eager=against["eager"],
        peak_megabytes={name: round(value / MEGABYTE, 1) for name, value in peaks.items()},
        sequences=sequences,
    )


if __name__ == "__main__":
    raise SystemExit(main())
