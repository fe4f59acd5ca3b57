"""What the KV shift costs in a training step, and against the convolution in the paper's appendix.

    python benchmarks/shift.py [--rounds 150] [--threads 2]

Three copies of one GQA model (4 layers, 256 wide, 8 query heads, 2 key/value heads, vocabulary of 4096) take
the same training step (forward, backward, fused AdamW, float32) on the same batch (8 x 256 tokens): without a
shift, with ours, and with the paper's: its appendix pads the sequence by a step on the left, unfolds windows
of two along it, multiplies them by the weights [G, 2] and sums over the window.

What is fair and what is not:
- The two shifts are checked to give the same losses and gradients before anything is timed. The unfolded one
  gets its weights in its own order (previous token first) and is handed no document starts, so it does
  nothing that the paper's code does not do. Both run eagerly, as that code does; `torch.compile` would fuse
  either.
- One shift against the other is checked on the operation, forward and backward, on keys and values of the
  model's shapes. Nothing else fills the processor's caches there.
- Inside a step the same question, (ours - none) / (unfold - none), divides two differences of about a percent
  of a step, and both contain what the two shifts share (the parameters, their gradients' bookkeeping, colder
  caches). It is printed with a 95% bootstrap interval over rounds (`in_step_over_unfold*`), without a bar.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable

import torch
from pairing import Times, arguments, at_most, difference, finish, interval, ratio, say, timed
from torch import Tensor, nn
from torch.nn.functional import pad

from keyshift import KeyshiftConfig, KeyshiftForCausalLM
from keyshift.attention.shift import Shift

ALONE_CALLS = 10
"""Calls per timing of a shift alone, so that one lasts milliseconds."""


class UnfoldShift(nn.Module):
    """The paper's way: a drop-in for a free `Shift` that holds its weights, the previous token's first."""

    def __init__(self, shift: Shift):
        super().__init__()
        self.window = shift.window
        self.weight = nn.Parameter(shift.weight.detach().flip(-1))

    def forward(self, x_BTGD: Tensor, starts_BT: Tensor | None, first_slot: int = 0) -> Tensor:
        assert starts_BT is None, "the paper's convolution knows no documents"
        windows_BTGDW = pad(x_BTGD, (0, 0, 0, 0, self.window - 1, 0)).unfold(1, self.window, 1)
        return (windows_BTGDW * self.weight[:, None]).sum(-1)


def models(config: KeyshiftConfig, seed: int) -> dict[str, KeyshiftForCausalLM]:
    """The three contenders, with equal weights wherever they have the same ones."""
    torch.manual_seed(seed)
    ours = KeyshiftForCausalLM(config)
    none, unfold = copy.deepcopy(ours), copy.deepcopy(ours)
    for block in none.model.layers:
        block.self_attn.key_shift = block.self_attn.value_shift = None
    for block in unfold.model.layers:
        attention = block.self_attn
        attention.key_shift = UnfoldShift(attention.key_shift)
        attention.value_shift = UnfoldShift(attention.value_shift)
    return {"none": none, "ours": ours, "unfold": unfold}


def training_step(model: KeyshiftForCausalLM, ids: Tensor) -> Callable[[], None]:
    """A function that takes one step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check_equal(ours: KeyshiftForCausalLM, unfold: KeyshiftForCausalLM, ids: Tensor) -> None:
    """Exit unless both shifts compute the same loss and the same gradients."""
    losses, gradients = [], []
    for model in (ours, unfold):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    pairs = [losses, *zip(*gradients, strict=True)]
    for (name, _), (first, second) in zip([("loss", None), *ours.named_parameters()], pairs, strict=True):
        if name.endswith("_shift.weight"):
            second = second.flip(-1)
        if not torch.allclose(first, second, rtol=1e-3, atol=1e-6):
            sys.exit(f"the two shifts disagree on {name}: {(first - second).abs().max():.1e}")


def alone(shift: nn.Module, tensors: list[Tensor]) -> Callable[[], None]:
    """A function that runs a shift forward and backward, over each of the tensors, several times."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]

    def run() -> None:
        for _ in range(ALONE_CALLS):
            for leaf in leaves:
                shifted = shift(leaf, None)
                torch.autograd.grad(shifted, (leaf, shift.weight), leaf.detach())

    return run


def cost_over_unfold(times: Times) -> float:
    """What ours adds to a step over what the unfolded one adds."""
    return difference(times["ours"], times["none"]) / difference(times["unfold"], times["none"])


def cost(name: str) -> Callable[[Times], float]:
    """The share that a shift adds to a step, as a statistic of rounds."""
    return lambda times: ratio(times[name], times["none"]) - 1


def main() -> int:
    options = arguments(__doc__, rounds=150).parse_args()
    torch.set_num_threads(options.threads)
    width, batch, tokens, rounds = (32, 2, 32, 5) if options.quick else (256, 8, 256, options.rounds)
    config = KeyshiftConfig(
        vocab_size=128 if options.quick else 4096,
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        attention="gqa",
        position="rope",
        shift="kv",
    )
    contenders = models(config, options.seed)
    ids = torch.randint(config.vocab_size, (batch, tokens))
    check_equal(contenders["ours"], contenders["unfold"], ids)
    say("the two shifts agree on loss and gradients")

    keys_and_values = [torch.randn(batch, tokens, 2, config.head_dim) for _ in range(2)]
    shifts = {name: contenders[name].model.layers[0].self_attn.key_shift for name in ("ours", "unfold")}
    apart = timed(
        {name: alone(copy.deepcopy(shift), keys_and_values) for name, shift in shifts.items()},
        rounds=rounds,
        seed=options.seed,
        label="alone",
    )
    steps = timed(
        {name: training_step(model, ids) for name, model in contenders.items()},
        rounds=rounds,
        seed=options.seed,
        label="step",
    )

    alone_seconds = {name: statistics.median(each) / ALONE_CALLS for name, each in apart.items()}
    step_seconds = {name: statistics.median(each) for name, each in steps.items()}
    share = config.num_hidden_layers / step_seconds["none"]
    return finish(
        [
            at_most("shift cost of a training step", cost("ours")(steps), 0.05),
            at_most("shift over unfold convolution", ratio(apart["ours"], apart["unfold"]), 1 / 3),
        ],
        shift_cost_interval=interval(cost("ours"), steps),
        unfold_cost_of_a_training_step=cost("unfold")(steps),
        unfold_cost_interval=interval(cost("unfold"), steps),
        in_step_over_unfold=cost_over_unfold(steps),
        in_step_over_unfold_interval=interval(cost_over_unfold, steps),
        step_seconds=step_seconds,
        alone_seconds_per_layer=alone_seconds,
        alone_share_of_a_training_step={name: each * share for name, each in alone_seconds.items()},
        rounds=rounds,
    )


if __name__ == "__main__":
    sys.exit(main())
