"""In-context learning score, passkey and repeated text, against the same computed by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from benchmark_mirror import text
from hypothesis import given
from hypothesis import strategies as st

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError
from keyshift.circuits import shipped_models
from keyshift.data import prepare, train_tokenizer
from keyshift.evaluation.builtin import Settings
from keyshift.evaluation.in_context import in_context
from keyshift.evaluation.in_context import lengths as icl_lengths
from keyshift.evaluation.passkey import DEPTHS, FILLER, passkey, requests
from keyshift.evaluation.passkey import lengths as passkey_lengths
from keyshift.evaluation.repeated import lengths as repeated_lengths
from keyshift.evaluation.repeated import repeated
from keyshift.evaluation.text import held_out, passages
from keyshift.opened import Opened, open_checkpoint


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A random model of 1,024 positions."""
    rng = random.Random(0)
    tokenizer = train_tokenizer([text(rng, 200) for _ in range(20)], 320)
    torch.manual_seed(0)
    config = KeyshiftConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        initializer_range=0.3,
        max_position_embeddings=1024,
        shift="kv",
    )
    folder = tmp_path_factory.mktemp("model")
    KeyshiftForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return open_checkpoint(str(folder), "cpu", "auto")


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(1)
    file = tmp_path_factory.mktemp("text") / "held_out.jsonl"
    rows = [json.dumps({"text": text(rng, words)}) for words in (900, 40, 1500, 700)]
    file.write_text("\n".join(rows) + "\n")
    return file


def settings(prose: Path | None, limit: int | None = None, batch_size: int = 3) -> Settings:
    return Settings(prose, limit, batch_size)


def ticks(*_: int) -> None:
    pass


def loss_of(opened: Opened, ids: list[int], place: int) -> float:
    """Loss of the token at ``place`` after those before it, alone in a batch."""
    with torch.no_grad():
        logits = opened.model(torch.tensor([ids[:place]])).logits[0, -1].double()
    return -float(logits.log_softmax(-1)[ids[place]])


def test_icl_is_the_loss_of_token_500_minus_that_of_token_50(opened: Opened, prose: Path) -> None:
    measures = in_context(opened, settings(prose), 500, ticks)
    rows: list[list[int]] = []
    for line in prose.read_text().splitlines():
        ids = opened.tokenizer.encode(json.loads(line)["text"], add_special_tokens=False)
        rows += [[0, *ids[first : first + 500]] for first in range(0, len(ids) - 499, 500)]
    assert len(rows) > 4
    early = [loss_of(opened, row, 50) for row in rows]
    late = [loss_of(opened, row, 500) for row in rows]
    found = {measure.metric: measure.value for measure in measures}
    assert {measure.questions for measure in measures} == {len(rows)}
    assert found["loss @50"] == pytest.approx(sum(early) / len(rows), rel=1e-5)
    assert found["loss @500"] == pytest.approx(sum(late) / len(rows), rel=1e-5)
    assert found["score"] == pytest.approx(found["loss @500"] - found["loss @50"], abs=1e-9)


def test_without_a_start_token_the_same_tokens_are_scored(opened: Opened, prose: Path) -> None:
    bare = Opened(opened.name, opened.model, opened.tokenizer, None, opened.positions)
    found = {m.metric: m.value for m in in_context(bare, settings(prose, limit=2), 500, ticks)}
    rows = passages(bare, prose, 500, 2).tolist()
    expected = sum(loss_of(bare, row, 499) for row in rows) / 2
    assert found["loss @500"] == pytest.approx(expected, rel=1e-5)


def test_repeated_scores_the_same_tokens_in_both_copies(opened: Opened, prose: Path) -> None:
    found = {m.metric: m.value for m in repeated(opened, settings(prose, limit=2), 32, ticks)}
    rows = [[0, *row, *row] for row in passages(opened, prose, 32, 2).tolist()]
    for copy, first in ((1, 2), (2, 34)):
        losses = [loss_of(opened, row, first + place) for row in rows for place in range(31)]
        assert found[f"copy {copy} @32"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["gain @32"] == pytest.approx(found["copy 1 @32"] - found["copy 2 @32"], abs=1e-9)


def test_models_with_induction_heads_gain_from_repetition_and_random_ones_do_not(
    opened: Opened, prose: Path
) -> None:
    for folder in shipped_models().values():
        trained = open_checkpoint(str(folder), "cpu", "auto")
        *_, gain = repeated(trained, settings(prose, limit=8), 32, ticks)
        assert gain.value > 2  # nats
    *_, gain = repeated(opened, settings(prose, limit=8), 32, ticks)
    assert abs(gain.value) < 1


@given(
    length=st.integers(256, 1024),
    depth=st.sampled_from(DEPTHS),
    key=st.integers(10_000, 99_999),
)
def test_a_passkey_request_hides_the_key_once_at_its_depth_and_fits(
    opened: Opened, length: int, depth: float, key: int
) -> None:
    others = [str(other) for other in (12_345, 67_890) if other != key]
    pairs = requests(opened, [str(key), *others], length, depth)
    (context,) = {tuple(context) for context, _ in pairs}
    assert [opened.tokenizer.decode(answer) for _, answer in pairs] == [f" {key}", *(f" {o}" for o in others)]
    assert max(len(context) + len(answer) for context, answer in pairs) - 1 <= length
    piece = len(opened.tokenizer.encode(FILLER, add_special_tokens=False))
    assert len(context) + max(len(answer) for _, answer in pairs) - 1 + piece > length  # no more filler fits
    assert context.count(0) == 1
    assert context[0] == 0
    said = opened.tokenizer.decode(context)
    assert said.count(str(key)) == 2  # the needle says it twice
    assert said.endswith("The pass key is")
    before, after = said.split(f"The pass key is {key}.")
    pieces = before.count("The grass is green."), after.count("The grass is green.")
    assert pieces[0] == round(depth * sum(pieces))


def test_passkey_counts_how_often_the_hidden_number_is_likeliest(opened: Opened) -> None:
    measures = passkey(opened, settings(None, limit=3), 256, ticks)
    total, *by_depth = measures
    assert total.questions == 15
    assert total.value == pytest.approx(sum(m.value for m in by_depth) / 5)
    right = 0
    for trial in range(3):
        numbers = random.Random(f"256 0.5 {trial}").sample(range(10_000, 100_000), 10)
        pairs = requests(opened, [str(number) for number in numbers], 256, 0.5)
        scores = [
            sum(loss_of(opened, [*context, *answer], len(context) + place) for place in range(len(answer)))
            for context, answer in pairs
        ]
        right += scores.index(min(scores)) == 0
    assert by_depth[2].metric == "acc @256, depth 50%"
    assert by_depth[2].value == pytest.approx(right / 3)


def test_lengths_end_at_the_models_positions() -> None:
    assert passkey_lengths(1000, "m") == [256, 512, 1000]
    assert passkey_lengths(1024, "m") == [256, 512, 1024]
    assert repeated_lengths(1025, "m") == [32, 128, 512]
    assert repeated_lengths(1024, "m") == [32, 128]
    assert icl_lengths(500, "m") == [500]
    for refuse, positions in ((passkey_lengths, 255), (repeated_lengths, 64), (icl_lengths, 499)):
        with pytest.raises(UserError, match=f"m has positions for {positions}"):
            refuse(positions, "m")


def test_a_prepared_store_gives_what_it_holds_out(opened: Opened, tmp_path: Path) -> None:
    rng = random.Random(3)
    documents = [text(rng, 300) for _ in range(60)]
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    store = tmp_path / "store"
    prepare(
        [file],
        store,
        tokenizer=None,
        vocab_size=300,
        sequence_length=16,
        batch_size=1,
        validation_fraction=0.3,
    )
    held = list(held_out(store))
    assert 5 < len(held) < 40
    assert set(held) < set(documents)
    assert len(passages(opened, store, 100, 8)) == 8


def test_text_that_is_too_short_or_missing_is_refused(opened: Opened, prose: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(UserError, match="no document has 500 tokens"):
        in_context(opened, settings(short), 500, ticks)
    with pytest.raises(UserError, match="--text"):
        in_context(opened, settings(None), 500, ticks)
    with pytest.raises(UserError, match="no such file or folder"):
        in_context(opened, settings(tmp_path / "none"), 500, ticks)
