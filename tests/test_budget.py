"""The budget of a run: every number against something counted or measured on a real model."""

import json
import tomllib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny import CASES, FOREIGN, Case
from torch.utils.flop_counter import FlopCounterMode

from keyshift import KeyshiftConfig, KeyshiftForCausalLM
from keyshift.cache import cache_bytes_per_token
from keyshift.configuration import CHOICES
from keyshift.recipe import Engine, Training, Variant, builtin_recipes, load_recipe
from keyshift.runs import models_of, parameters
from keyshift.training.activations import saved_bytes
from keyshift.training.budget import (
    COLUMNS,
    budget,
    count_parameters,
    flops_per_token,
    memory_bytes,
    print_budget,
)
from keyshift.training.peak import PEAKS, peak_flops
from keyshift.training.step_time import StepTime, time_step

ROWS, LENGTH = 3, 24
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}

every_mechanism = pytest.mark.parametrize(
    "case",
    [
        next(each for each in CASES if each.attention == attention and each.position == position)
        for attention in CHOICES["attention"]
        for position in ("rope", "decoupled_rope", "learned")
    ]
    + FOREIGN[:2],
    ids=str,
)


def model_of(case: Case, shift: str = "kv", **changes: Any) -> KeyshiftForCausalLM:
    torch.manual_seed(0)
    return KeyshiftForCausalLM(case.config(shift=shift, mlp="swiglu", **changes)).train()


def ids_for(model: KeyshiftForCausalLM, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (rows, LENGTH))


@every_mechanism
def test_flops_are_those_that_torch_counts(case: Case):
    """To the last one, but for the zeros that values are padded with up to the width of keys."""
    model = model_of(case, attn_implementation="eager")
    model.set_attn_implementation("eager")
    config, ids = model.config, ids_for(model)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    padded = 6 * config.num_hidden_layers * LENGTH * config.num_attention_heads
    padded *= config.qk_head_dim - config.head_dim
    assert counter.get_total_flops() == ids.numel() * (flops_per_token(config, LENGTH) + padded)


def test_tied_embeddings_are_multiplied_once_as_output_layer():
    tied, untied = (KeyshiftConfig(**SIZES, tie_word_embeddings=tied) for tied in (True, False))
    assert flops_per_token(tied, 8) == flops_per_token(untied, 8)
    assert count_parameters(untied).total - count_parameters(tied).total == 64 * 32
    assert count_parameters(untied).non_embedding == count_parameters(tied).non_embedding


@every_mechanism
def test_parameters_are_those_of_the_model_by_name(case: Case):
    model = model_of(case)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    embedding = sum(size for name, size in sizes.items() if "embed" in name or "lm_head" in name)
    counts = count_parameters(model.config)
    assert counts.total == sum(sizes.values())
    assert counts.non_embedding == sum(sizes.values()) - embedding
    assert counts.shift == sum(size for name, size in sizes.items() if "_shift" in name)
    assert counts.block == sum(size for name, size in sizes.items() if ".layers.1." in name)


def test_the_papers_shift_has_four_numbers_per_group_and_layer():
    config = KeyshiftConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=3, shift="kv")
    assert count_parameters(config).shift == 4 * 2 * 3


def measured(model: KeyshiftForCausalLM, ids: torch.Tensor, half: bool) -> int:
    """Bytes that a real forward pass keeps beside the parameters."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    cast = torch.autocast("cpu", torch.bfloat16) if half else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        model(input_ids=ids, labels=ids, use_cache=False)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(storage.nbytes() for place, storage in kept.items() if place not in own)


@every_mechanism
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_activations_are_those_that_autograd_keeps(case: Case, half: bool):
    """Of a model of five blocks, from those of one and of two."""
    model = model_of(case, num_hidden_layers=5)
    saved = saved_bytes(
        model.config, rows=ROWS, sequence_length=LENGTH, half=half, sharded=False, recompute=False
    )
    assert sum(saved) == pytest.approx(measured(model, ids_for(model), half), rel=0.01)
    growth = measured(model, ids_for(model, 3 * ROWS), half) - measured(model, ids_for(model), half)
    assert saved.activations == pytest.approx(growth / 2, rel=0.01)


def test_checkpointed_activations_grow_by_a_blocks_input_per_block():
    def kept(layers: int, recompute: bool) -> int:
        config = KeyshiftConfig(**SIZES, num_hidden_layers=layers)
        given = {"half": False, "sharded": False, "recompute": recompute}
        return saved_bytes(config, rows=ROWS, sequence_length=LENGTH, **given).activations

    assert kept(9, True) - kept(8, True) == ROWS * LENGTH * 32 * 4
    assert kept(8, True) < kept(8, False)


def test_states_are_those_of_a_real_optimiser():
    config = KeyshiftConfig(**SIZES, num_hidden_layers=2, shift="kv")
    model = KeyshiftForCausalLM(config)
    ids = ids_for(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moments = [
        value for state in optimizer.state.values() for name, value in state.items() if "exp_avg" in name
    ]
    given = {"rows": 2, "sequence_length": LENGTH, "half": False}
    found = memory_bytes(config, Engine(), **given, world_size=1)
    assert found["weights"] == sum(each.nbytes for each in model.parameters())
    assert found["gradients"] == sum(each.grad.nbytes for each in model.parameters())
    assert found["optimizer"] == sum(each.nbytes for each in moments)
    shared = memory_bytes(config, Engine(parallel="fsdp"), **given, world_size=4)
    for what in ("weights", "gradients", "optimizer"):
        assert shared[what] == pytest.approx(found[what] / 4, rel=0.001)
    replicas = memory_bytes(config, Engine(), **given, world_size=4)
    assert replicas["copies"] - found["copies"] == found["gradients"]


# Time


def test_a_step_is_timed_where_it_fits_and_where_it_does_not_the_reason_is_given(monkeypatch):
    config = KeyshiftConfig(**SIZES, num_hidden_layers=1)
    given = {"sequence_length": LENGTH, "world_size": 1, "half": False}
    timed = time_step(config, Training(batch_size=4), Engine(micro_batch_size=2), **given)
    assert timed.why_not is None
    assert 0 < timed.micro_batch < 10
    assert 0 < timed.update < 10
    large = KeyshiftConfig(vocab_size=1000, hidden_size=16384, num_hidden_layers=200)
    refused = time_step(large, Training(batch_size=4), Engine(), **given)
    assert refused.micro_batch is None
    assert "GiB are free" in refused.why_not
    monkeypatch.setattr("keyshift.training.step_time.PATIENCE", 0.0)
    assert "minutes" in time_step(config, Training(batch_size=4), Engine(), **given).why_not


def test_the_time_of_a_run_is_that_of_its_micro_batches_and_updates():
    config = KeyshiftConfig(**SIZES, num_hidden_layers=1)
    found = budget(
        config,
        Training(steps=100, batch_size=32),
        Engine(micro_batch_size=2),
        name="GQA",
        sequence_length=LENGTH,
        world_size=4,
        half=False,
        timed=StepTime(0.5, 0.25),
    )
    assert found["step_seconds"] == 4 * 0.5 + 0.25
    assert found["run_seconds"] == 225
    assert found["tokens"] == 100 * 32 * LENGTH
    assert found["flops"] == found["tokens"] * found["flops_per_token"]
    assert found["cache_bytes_per_token"] == cache_bytes_per_token(config, torch.bfloat16)


# The papers' sizes

NAMED = {"350m": 350e6, "1.5b": 1.5e9, "2.9b": 2.9e9, "6.7b": 6.7e9, "13b": 13e9, "19b": 19e9}
TOKENS = {"350m": 30e9, "1.5b": 10e9, "2.9b": 500e9, "6.7b": 10e9, "13b": 10e9, "19b": 200e9}


@dataclass(frozen=True)
class Shapes:
    """Of text that is not there."""

    vocab_size: int
    sequence_length: int
    special_tokens: dict[str, int]


def pretrained(name: str) -> list[tuple[Variant, KeyshiftConfig]]:
    """The variants of a recipe and their models."""
    recipe = load_recipe(f"pretrain/{name}", {"data.paths": ["x"]})
    shapes = Shapes(recipe.data.vocab_size, recipe.data.sequence_length, {})
    models = models_of(recipe, lambda variant: shapes)
    return [(variant, models[each]) for each, variant in recipe.grid().items()]


@pytest.mark.parametrize("name", NAMED)
def test_the_papers_sizes_have_the_parameters_of_their_names_with_every_mechanism(name):
    found = pretrained(name)
    assert [variant.name for variant, _ in found] == ["GQA", "GQA + KV shift", "MLA", "GVA", "GVA + shift"]
    for variant, config in found:
        assert parameters(config) == pytest.approx(NAMED[name], rel=0.05)
        training = variant.training
        tokens = training.steps * training.batch_size * config.max_position_embeddings
        assert tokens == pytest.approx(TOKENS[name], rel=1e-3)


def test_the_papers_2_9b_model_has_512_numbers_in_its_shift():
    (shifted,) = (c for v, c in pretrained("2.9b") if v.name == "GQA + KV shift")
    assert count_parameters(shifted).shift == 512


def test_shifted_gva_caches_about_half_of_gqa_at_every_size():
    for name in NAMED:
        cached = {v.name: cache_bytes_per_token(c, torch.bfloat16) for v, c in pretrained(name)}
        assert 0.5 < cached["GVA + shift"] / cached["GQA"] < 0.54


def test_every_size_extends_the_base():
    for name, path in builtin_recipes().items():
        if name.startswith("pretrain/") and name != "pretrain/base":
            assert tomllib.loads(path.read_text())["extends"] == "pretrain/base"


def test_the_table_fits_80_columns_and_the_numbers_are_json():
    budgets = []
    for name in ("350m", "19b"):
        recipe = load_recipe(f"pretrain/{name}", {"data.paths": ["x"]})
        for variant, config in pretrained(name):
            budgets.append(
                budget(
                    config,
                    variant.training,
                    recipe.engine,
                    name=variant.name,
                    sequence_length=config.max_position_embeddings,
                    world_size=8,
                    half=True,
                    timed=StepTime(1.0, 0.1) if name == "350m" else StepTime(why_not="one needs 300 GiB"),
                )
            )
    assert json.loads(json.dumps(budgets)) == budgets
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_budget(budgets, console)
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert len(budgets) == 2 * COLUMNS
    assert "…" not in shown
    assert "GQA, GQA + KV shift, MLA" in shown.replace("\n", " ")
    for text in ("355M", "19B", "one needs 300 GiB"):
        assert text in shown


# Peaks


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", 1307.4e12),
        ("Tesla V100-SXM2-16GB", None),
        ("Intel(R) Xeon(R) Platinum", None),
        ("", None),
    ],
)
def test_peaks_are_known_by_the_names_that_devices_give(device: str, peak: float | None):
    assert peak_flops(device) == peak
    assert all(1e13 < each < 1e16 for each in PEAKS.values())
