"""Against TransformerLens, on the same random weights, offline: what it computes too, we find too."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from keyshift import UserError
from keyshift.circuits.capture import AttentionCall
from keyshift.circuits.composition import composition
from keyshift.circuits.eigen import Vocabulary
from keyshift.circuits.lift import lift
from keyshift.circuits.loading import load_model
from keyshift.circuits.model import CircuitModel
from keyshift.circuits.repeats import sample_repeats
from keyshift.circuits.scores import head_scores, patterns
from keyshift.circuits.streams import read_streams, stream_pieces
from keyshift.circuits.weights import layer_weights

lens = pytest.importorskip("transformer_lens")
sources = pytest.importorskip("transformer_lens.model_bridge.sources")

from transformer_lens.head_detector import detect_head  # noqa: E402
from transformer_lens.model_bridge import TransformerBridge  # noqa: E402
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module  # noqa: E402

VOCAB = 40
SIZES: dict[str, Any] = {
    "d_model": 16,
    "n_layers": 2,
    "d_head": 6,
    "n_heads": 4,
    "n_ctx": 64,
    "d_vocab": VOCAB,
    "d_mlp": 24,
    "attn_only": True,
    "act_fn": "gelu",
    "normalization_type": "LN",
    "positional_embedding_type": "standard",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "attention only": {"n_layers": 3},
    "square": {"d_head": 4},
    "LNPre": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS"},
    "RMSPre": {"normalization_type": "RMSPre", "attn_only": False},
    "no norm": {"normalization_type": None},
    "MLP": {"attn_only": False},
    "grouped": {"n_key_value_heads": 2, "attn_only": False, "final_rms": True},
    "grouped, rotary": {
        "n_key_value_heads": 2,
        "positional_embedding_type": "rotary",
        "normalization_type": "RMS",
        "attn_only": False,
        "gated_mlp": True,
        "act_fn": "silu",
    },
    "soft cap": {"attn_scores_soft_cap": 4.0, "output_logits_soft_cap": 5.0},
}
LENS_KINDS = {
    "previous_token_head": "previous_token",
    "duplicate_token_head": "duplicate_token",
    "induction_head": "induction",
}


def bridge_of(config: dict[str, Any]) -> Any:
    """A bridge around a native model, with weights large enough that attention is far from flat."""
    bridge = TransformerBridge.boot_native({**SIZES, **config})
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in bridge.original_model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(1 + 0.3 * drawn if "ln" in name and "weight" in name else 0.5 * drawn)
    return bridge.eval()


def words(tokens: int = VOCAB) -> PreTrainedTokenizerFast:
    """Words w2, w3, …, and before them what begins a text (0) and ends it (1)."""
    numbers = {"<begin>": 0, "<end>": 1, **{f"w{n}": n for n in range(2, tokens)}}
    split = Tokenizer(models.WordLevel(numbers, unk_token="<end>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<begin>", "eos_token": "<end>", "pad_token": "<end>", "unk_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=split, **special)


def some_ids(sequences: int = 3, tokens: int = 20) -> Tensor:
    return torch.randint(VOCAB, (sequences, tokens), generator=torch.Generator().manual_seed(2))


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def calls(model: CircuitModel, ids: Tensor) -> list[AttentionCall]:
    seen: list[AttentionCall] = []
    model.watch(ids, observer=lambda call: seen.append(call))
    return seen


@pytest.fixture(params=CONFIGS, ids=str)
def bridge(request: pytest.FixtureRequest) -> Any:
    return bridge_of(CONFIGS[request.param])


@torch.no_grad()
def test_logits_are_its_own(bridge: Any) -> None:
    before = bridge(some_ids())
    model = CircuitModel(bridge)
    seen: list[AttentionCall] = []
    assert torch.equal(model.logits(some_ids()), before)
    assert torch.equal(model.logits(some_ids(), observer=lambda call: seen.append(call)), before)
    assert torch.equal(bridge(some_ids()), before)
    assert [call.module for call in seen] == [layer.attention for layer in model.layers]
    assert len(seen) == bridge.cfg.n_layers


@torch.no_grad()
def test_patterns_queries_keys_values_and_results(bridge: Any) -> None:
    model = CircuitModel(bridge)
    _, cache = bridge.run_with_cache(some_ids())
    for layer, (call, pattern) in enumerate(
        zip(calls(model, some_ids()), patterns(model, some_ids()), strict=True)
    ):
        close(pattern, cache["pattern", layer])
        assert float(pattern.max(-1).values[:, :, 5:].mean()) > 0.25  # even spread: 0.08
        close(call.output_BTHV.flatten(2), cache["z", layer].flatten(2))
        close(call.values_BGTV.transpose(1, 2).flatten(2), cache["v", layer].flatten(2))
        if model.position_table is not None:
            close(call.queries_BHTD.transpose(1, 2).flatten(2), cache["q", layer].flatten(2))
            close(call.keys_BGTD.transpose(1, 2).flatten(2), cache["k", layer].flatten(2))


@torch.no_grad()
def test_left_padding(bridge: Any) -> None:
    model = CircuitModel(bridge)
    ids = some_ids()
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    alone = ids[1:2, 7:]
    close(model.logits(ids, mask)[1:2, 7:], model.logits(alone), 1e-4)
    for padded, plain in zip(patterns(model, ids, mask), patterns(model, alone), strict=True):
        close(padded[1:2, :, 7:, 7:], plain)
        assert float(padded[1, :, :, :7].abs().max()) == 0
    scores = head_scores(model, ids[1:2], mask[1:2], convention="transformer_lens")
    expected = head_scores(model, alone, convention="transformer_lens")
    for ours, plain_scores in zip(scores.scores, expected.scores, strict=True):
        for kind, values in ours.items():
            close(values, plain_scores[kind])


@torch.no_grad()
def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(UserError, match="reads later tokens"):
        CircuitModel(bridge_of({"attention_dir": "bidirectional"}))


@torch.no_grad()
def test_ablating_a_head(bridge: Any) -> None:
    model = CircuitModel(bridge)
    plain = model.logits(some_ids())
    for name in model.head_names():
        layer, head = model.head(name)
        attention = model.layers[layer].attention

        def without(call: AttentionCall, attention: Any = attention, head: int = head) -> Tensor | None:
            if call.module is not attention:
                return None
            kept = call.output_BTHV.clone()
            kept[:, :, head] = 0
            return kept

        def zeroed(z: Tensor, hook: Any, head: int = head) -> Tensor:
            z = z.clone()
            z.view(*z.shape[:2], bridge.cfg.n_heads, -1)[:, :, head] = 0
            return z

        ours = model.logits(some_ids(), observer=without)
        theirs = bridge.run_with_hooks(some_ids(), fwd_hooks=[(f"blocks.{layer}.attn.hook_z", zeroed)])
        close(ours, theirs)
        assert float((ours - plain).abs().max()) > 1e-3
    assert torch.equal(bridge(some_ids()), plain)


def assert_same_weights(model: CircuitModel, bridge: Any, fold_norms: bool) -> None:
    for index in range(len(model.layers)):
        weights = layer_weights(model, index, offset=0, fold_norms=fold_norms)
        theirs = bridge.blocks[index].attn
        close(weights.query_HDN, theirs.W_Q)
        close(weights.key_GDN, theirs.W_K)
        close(weights.value_GDM, theirs.W_V)
        close(weights.output_HMD, theirs.W_O)


@torch.no_grad()
def test_weights_of_heads(bridge: Any) -> None:
    assert_same_weights(CircuitModel(bridge), bridge, fold_norms=False)


def fold(bridge: Any) -> None:
    """TransformerLens' own folding of norms into weights, without what else it can do to them."""
    bridge.enable_compatibility_mode(
        center_writing_weights=False, center_unembed=False, fold_value_biases=False, disable_warnings=True
    )


FOLDED = [name for name, config in CONFIGS.items() if config.get("normalization_type", "LN") in ("LN", "RMS")]


@pytest.mark.parametrize("name", FOLDED)
@torch.no_grad()
def test_folded_weights_of_heads(name: str) -> None:
    bridge = bridge_of(CONFIGS[name])
    model = CircuitModel(copy.deepcopy(bridge))
    plain = bridge(some_ids())
    raw = bridge.W_Q.clone()
    fold(bridge)
    close(bridge(some_ids()).log_softmax(-1), plain.log_softmax(-1), 1e-4)
    assert float((bridge.W_Q - raw).abs().max()) > 0.05
    assert_same_weights(model, bridge, fold_norms=True)
    assert_same_weights(CircuitModel(bridge), bridge, fold_norms=False)
    assert_same_weights(CircuitModel(bridge), bridge, fold_norms=True)  # nothing is left to fold


@torch.no_grad()
def test_rotated_weights() -> None:
    bridge = bridge_of(CONFIGS["grouped, rotary"])
    model = CircuitModel(bridge)
    queries, keys = bridge.blocks[1].attn.W_Q[None], bridge.blocks[1].attn.W_K[None]
    rotary = bridge.original_model.rotary
    for offset in (1, 9):
        place = torch.full((1, queries.shape[2]), offset)
        rotated, _ = rotary.apply_rope(queries, queries, position_ids=place)
        weights = layer_weights(model, 1, offset=offset, fold_norms=False)
        close(weights.query_HDN, rotated[0])
        close(weights.key_GDN, keys[0])
        assert weights.offset == offset
    with pytest.raises(UserError, match="needs an offset"):
        layer_weights(model, 1)


def assert_same_composition(model: CircuitModel, bridge: Any, fold_norms: bool) -> None:
    layers = [
        layer_weights(model, index, offset=0, fold_norms=fold_norms) for index in range(len(model.layers))
    ]
    found = set()
    for kind in ("Q", "K", "V"):
        theirs = bridge.all_composition_scores(kind).scores
        for later in range(len(layers)):
            for earlier in range(later):
                for head in range(layers[later].heads):
                    for before in range(layers[earlier].heads):
                        score = composition(kind, layers[later], head, layers[earlier], before)  # type: ignore[arg-type]
                        assert score == pytest.approx(float(theirs[earlier, before, later, head]), abs=1e-5)
                        found.add(round(score, 4))
    assert len(found) > 20


@torch.no_grad()
def test_composition(bridge: Any) -> None:
    assert_same_composition(CircuitModel(bridge), bridge, fold_norms=False)


@pytest.mark.parametrize("name", FOLDED)
@torch.no_grad()
def test_composition_with_norms_folded(name: str) -> None:
    bridge = bridge_of(CONFIGS[name])
    model = CircuitModel(copy.deepcopy(bridge))
    fold(bridge)
    assert_same_composition(model, bridge, fold_norms=True)


def assert_same_eigenvalues(model: CircuitModel, bridge: Any, fold_norms: bool) -> None:
    """Copying as TransformerLens' own matrices give it: the eigenvalues of W_E W_V W_O W_U."""
    vocabulary = Vocabulary(model, fold_norms)
    found = set()
    for index in range(len(model.layers)):
        weights = layer_weights(model, index, offset=0, fold_norms=fold_norms)
        for head in range(weights.heads):
            into, out = bridge.OV[index, head].A.double(), bridge.OV[index, head].B.double()
            circuit = lens.FactoredMatrix(bridge.W_E.double() @ into, out @ bridge.W_U.double())
            ours = vocabulary.copying(weights, head).value
            for values in (circuit.eigenvalues, torch.linalg.eigvals(circuit.AB)):
                assert ours == pytest.approx(float(values.real.sum() / values.abs().sum()), abs=1e-5)
            found.add(round(ours, 3))
    assert len(found) > 4


@torch.no_grad()
def test_eigenvalue_positivity(bridge: Any) -> None:
    assert_same_eigenvalues(CircuitModel(bridge), bridge, fold_norms=False)


@pytest.mark.parametrize("name", FOLDED)
@torch.no_grad()
def test_eigenvalue_positivity_with_norms_folded(name: str) -> None:
    bridge = bridge_of(CONFIGS[name])
    model = CircuitModel(copy.deepcopy(bridge))
    fold(bridge)
    assert_same_eigenvalues(model, bridge, fold_norms=True)


@pytest.mark.parametrize("repeated", [True, False], ids=["repeated", "text"])
@torch.no_grad()
def test_head_detector(bridge: Any, repeated: bool) -> None:
    bridge.tokenizer, bridge.cfg.tokenizer_prepends_bos = words(), False
    model = CircuitModel(bridge, words())
    draw = torch.Generator().manual_seed(3)
    if repeated:
        sequences: Any = sample_repeats(model, period=15, sequences=2, seed=3)
        ids = sequences.ids_ST
    else:  # few words, each many times, and runs of the same
        rows = [[0, *torch.randint(2, 8, (25,), generator=draw).tolist()] for _ in range(2)]
        sequences = ids = torch.tensor(rows)
    texts = [" ".join(f"w{token}" for token in row[1:].tolist()) for row in ids]
    assert torch.equal(torch.cat([bridge.to_tokens(text) for text in texts]), ids)
    ours = head_scores(model, sequences, convention="transformer_lens")
    for name, kind in LENS_KINDS.items():
        theirs = detect_head(bridge, texts, name)
        found = torch.stack([scores[kind] for scores in ours.scores])  # type: ignore[index]
        close(found, theirs)
        assert float(found.max() - found.min()) > 0.01


@torch.no_grad()
def test_the_parts_of_stream_and_score_add_up(bridge: Any) -> None:
    model = CircuitModel(bridge, words())
    sequences = sample_repeats(model, period=10, sequences=2)
    streams = read_streams(model, sequences.ids_ST)
    _, cache = bridge.run_with_cache(sequences.ids_ST)
    for layer, before in enumerate(streams.before):
        close(before, cache["resid_pre", layer])
        pieces = stream_pieces(model, streams, layer)
        close(sum(pieces.values(), torch.zeros(())), before)
        assert ("position" in pieces) == (bridge.cfg.positional_embedding_type == "standard")
        assert ("mlp 0" in pieces) == (layer > 0 and not bridge.cfg.attn_only)
    if bridge.cfg.attn_scores_soft_cap <= 0:  # a capped score is no sum
        assert lift(model, sequences, 1, 2, streams=streams).residual < 1e-4


GPT2 = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64, initializer_range=0.4)
LLAMA = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=48,
    max_position_embeddings=64,
    initializer_range=0.4,
)
HUGGING_FACE: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: GPT2LMHeadModel(GPT2),
    "Llama": lambda: LlamaForCausalLM(LLAMA),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
@torch.no_grad()
def test_a_transformers_model_that_it_wraps(name: str) -> None:
    torch.manual_seed(0)
    theirs = HUGGING_FACE[name]().eval()
    bridge = build_bridge_from_module(
        copy.deepcopy(theirs), type(theirs).__name__, hf_config=theirs.config
    ).eval()
    model = CircuitModel(theirs)
    logits, cache = bridge.run_with_cache(some_ids())
    close(model.logits(some_ids()), logits, 1e-4)
    for layer, pattern in enumerate(patterns(model, some_ids())):
        close(pattern, cache["pattern", layer])
        assert float(pattern.max(-1).values[:, :, 5:].mean()) > 0.3
    assert_same_weights(model, bridge, fold_norms=False)
    assert_same_composition(model, bridge, fold_norms=False)
    assert_same_eigenvalues(model, bridge, fold_norms=False)
    with pytest.raises(UserError, match="pass that model itself"):
        CircuitModel(bridge)


def legacy(bridge: Any) -> dict[str, Tensor]:
    """The weights as TransformerLens' own checkpoints hold them."""
    weights = {"embed.W_E": bridge.W_E, "pos_embed.W_pos": bridge.W_pos, "unembed.W_U": bridge.W_U}
    norms = {"ln_final": bridge.ln_final}
    for index, block in enumerate(bridge.blocks):
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
            weights[f"blocks.{index}.attn.{name}"] = getattr(block.attn, name)
        weights[f"blocks.{index}.attn.mask"] = torch.ones(64, 64, dtype=torch.bool).tril()
        weights[f"blocks.{index}.attn.IGNORE"] = torch.tensor(-1e5)
        norms[f"blocks.{index}.ln1"] = block.ln1
        if not bridge.cfg.attn_only:
            norms[f"blocks.{index}.ln2"] = block.ln2
            mlp = {
                "W_in": block.mlp.W_in,
                "b_in": block.mlp.b_in,
                "W_out": block.mlp.W_out,
                "b_out": block.mlp.b_out,
            }
            weights |= {f"blocks.{index}.mlp.{name}": tensor for name, tensor in mlp.items()}
    for name, norm in norms.items():
        if bridge.cfg.normalization_type == "LN":
            weights |= {f"{name}.w": norm.weight, f"{name}.b": norm.bias}
    return {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}


def write(folder: Path, weights: Any, name: str = "model_final.pth", **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {key: value for key, value in SIZES.items() if not key.startswith(("norm", "pos"))}
    content = {**sizes, "normalization": "LN", "act_fn": "gelu", "seed": 1, "device": "cuda", **config}
    (folder / "config.json").write_text(json.dumps(content))
    torch.save(weights, folder / name)
    return folder


@pytest.mark.parametrize(
    "config", [{}, {"normalization": "LNPre"}, {"attn_only": False}, {"act_fn": "relu", "attn_only": False}]
)
@torch.no_grad()
def test_a_folder_of_its_format(config: dict[str, Any], tmp_path: Path) -> None:
    named = {"normalization_type": config.get("normalization", "LN"), **config}
    named.pop("normalization", None)
    bridge = bridge_of(named)
    write(tmp_path, legacy(bridge), **config)
    model = load_model(str(tmp_path))
    close(model.logits(some_ids()), bridge(some_ids()))
    assert model.tokenizer is None
    words().save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).encode("w3").tolist() == [[0, 3]]


@pytest.mark.parametrize("name", ["grouped, rotary", "soft cap", "no norm"])
@torch.no_grad()
def test_a_folder_of_its_present_format(name: str, tmp_path: Path) -> None:
    bridge = bridge_of(CONFIGS[name])
    config = {**SIZES, **CONFIGS[name]}
    write(tmp_path, bridge.state_dict(), "weights.pth", **config)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["normalization"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert torch.equal(load_model(str(tmp_path)).logits(some_ids()), bridge(some_ids()))


def cached(cache: Path, repository: str) -> Path:
    """Where the hub's cache keeps a repository."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / ".no_exist" / ("0" * 40)).mkdir(parents=True)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and a list of files for TransformerLens, which asks the hub for it."""

    def files(_: Any, repository: str) -> list[str]:
        snapshot = tmp_path / f"models--{repository.replace('/', '--')}" / "snapshots" / ("0" * 40)
        return [file.name for file in snapshot.iterdir()]

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", files)
    return tmp_path


@torch.no_grad()
def test_its_own_checkpoints(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, tokenizer = "NeelNanda/Attn_Only_2L512W_C4_Code", "NeelNanda/gpt-neox-tokenizer-digits"
    bridge = bridge_of({})
    write(cached(cache, repository), legacy(bridge), tokenizer_name=tokenizer)
    words().save_pretrained(snapshot := cached(cache, tokenizer))
    (snapshot.parents[1] / ".no_exist" / ("0" * 40) / "config.json").touch()  # as when the hub had been asked
    theirs = TransformerBridge.boot_tl_legacy(repository)(some_ids())
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))  # but no list of files any more
    for name in ("attn-only-2l", "Attn-Only-2L-C4-Code", repository):
        model = load_model(name)
        assert model.name == name
        assert torch.equal(model.logits(some_ids()), theirs)
        assert model.encode("w3 w4").tolist() == [[0, 3, 4]]
    close(theirs, bridge(some_ids()))


@torch.no_grad()
def test_its_old_checkpoints(cache: Path) -> None:
    bridge = bridge_of({"attn_only": False})
    weights = {
        name.replace("ln_final", "norm").replace("ln", "norm"): tensor.mT.contiguous()
        if "W_" in name
        else tensor
        for name, tensor in legacy(bridge).items()
    }
    write(cached(cache, "NeelNanda/SoLU_1L_v9_old"), weights, attn_only=False)
    close(load_model("solu-1l-old").logits(some_ids()), bridge(some_ids()))


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        ({"shortformer_pos": True}, {}, "shortformer_pos=True"),
        ({"parallel_attn_mlp": True}, {}, "parallel_attn_mlp=True"),
        ({"positional_embedding_type": "rotary"}, {}, "rotates other pairs"),
        ({"positional_embedding_type": "alibi"}, {}, "alibi"),
        ({"attention_dir": "bidirectional"}, {}, "reads later tokens"),
        ({"n_heads": 2}, {}, "expected (2, 16, 6)"),
        ({}, {"ln_final.w": None}, 'Missing key(s) in state_dict: "ln_out'),
        ({}, {"something.else": torch.zeros(1)}, "something.else"),
        ({}, {"ln_final.w": torch.full((16,), torch.nan)}, "NaN"),
        ({"tokenizer_name": "nobody/nothing"}, {}, "tokenizer_name='nobody/nothing'"),
    ],
)
def test_a_bad_folder_is_one_line(
    config: dict[str, Any], change: dict[str, Tensor | None], said: str, tmp_path: Path
) -> None:
    weights = {
        name: tensor for name, tensor in {**legacy(bridge_of({})), **change}.items() if tensor is not None
    }
    write(tmp_path, weights, **config)
    with pytest.raises(UserError) as error:
        load_model(str(tmp_path))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_which_state_dict(tmp_path: Path) -> None:
    bridge = bridge_of({})
    write(tmp_path, legacy(bridge), "one.pth")
    write(tmp_path, legacy(bridge_of({"n_layers": 1})), "two.pth")
    with pytest.raises(UserError, match=r"has 2 \*\.pth files"):
        load_model(str(tmp_path))
    (tmp_path / "one.pth").rename(tmp_path / "one_final.pth")
    assert len(load_model(str(tmp_path)).layers) == 2
    (tmp_path / "one_final.pth").write_bytes(b"no weights")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(str(tmp_path))
    (tmp_path / "one_final.pth").unlink()
    (tmp_path / "two.pth").unlink()
    with pytest.raises(UserError, match=r"has 0 \*\.pth files"):
        load_model(str(tmp_path))


def test_its_own_checkpoints_without_network() -> None:
    with pytest.raises(UserError) as error:
        load_model("attn-only-1l")
    assert "attn-only-1l" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_it_does_not_have() -> None:
    with pytest.raises(UserError, match="solu-77l"):
        load_model("solu-77l")
