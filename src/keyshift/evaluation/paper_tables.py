"""The papers' tables: which task stands in which column, and the rows that they published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column: the harness's task, examples in its prompt (None: as the task says), and its metric."""

    title: str
    task: str
    metric: str
    shots: int | None = 0


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, in percent.

    Attributes:
        rows: as published; with an average last, if the table has one.
        note: how it was read.
    """

    title: str
    source: str
    columns: tuple[Column, ...]
    average: bool
    rows: dict[str, tuple[float, ...]]
    note: str


GVA = PaperTable(
    title="Table 2 of the GVA paper",
    source="arXiv 2609.13285",
    columns=(
        Column("HellaSwag", "hellaswag", "acc_norm"),
        Column("WinoGrande", "winogrande", "acc"),
        Column("OBQA", "openbookqa", "acc_norm"),
        Column("ARC-E", "arc_easy", "acc"),
        Column("ARC-C", "arc_challenge", "acc_norm"),
    ),
    average=True,
    rows={
        "GQA": (43.41, 52.48, 33.40, 63.42, 29.09, 44.36),
        "MLA": (43.20, 51.61, 34.60, 62.87, 27.13, 43.88),
        "GVA baseline": (42.12, 52.96, 34.80, 61.95, 27.73, 43.91),
        "GVA, scale-matched + Q-norm": (42.05, 53.51, 34.40, 62.75, 29.35, 44.41),
        "GVA, variance-fixed, no Q-norm": (42.71, 53.35, 32.20, 62.33, 28.24, 43.77),
        "GVA + DRoPE d_r=24": (42.94, 53.12, 33.20, 63.69, 28.50, 44.29),
        "GVA + DRoPE d_r=16": (42.69, 53.35, 33.60, 63.81, 28.32, 44.35),
    },
    note="Zero-shot; published: means of three seeds. The paper does not say which accuracy it reports. Its "
    "levels are those of acc_norm for HellaSwag, OBQA and ARC-C; for ARC-E acc is what papers on attention "
    "report; WinoGrande has acc alone. eval.json has both where there are two.",
)

KV_SHIFT = PaperTable(
    title="Table 2 of the KV shifting paper",
    source="arXiv 2411.19574",
    columns=(
        Column("LAMBADA", "lambada_openai", "acc"),
        Column("WinoG", "winogrande", "acc"),
        Column("HellaS", "hellaswag", "acc"),
        Column("ARC-E", "arc_easy", "acc"),
        Column("ARC-C", "arc_challenge", "acc"),
        Column("CMMLU", "cmmlu", "acc", 5),
        Column("MMLU", "mmlu", "acc", 5),
        Column("MATH", "minerva_math500", "exact_match", None),
    ),
    average=True,
    rows={
        "Vanilla 2.9B, 500B": (51.66, 54.06, 44.49, 36.20, 27.90, 38.22, 37.26, 1.80, 36.45),
        "KV shift 2.9B, 500B": (54.51, 55.33, 44.52, 39.02, 30.89, 40.78, 40.88, 2.60, 38.57),
        "Vanilla 19B, 200B": (60.88, 49.01, 47.36, 33.25, 25.78, 42.92, 42.68, 2.60, 38.06),
        "KV shift 19B, 200B": (62.35, 48.38, 48.42, 33.28, 29.32, 42.40, 43.29, 3.20, 38.83),
    },
    note="Published: one run each. MMLU is 5-shot (it equals the few-shot column of their Table 3), and so, "
    "it is assumed, is CMMLU; their MATH scores are multiples of 0.2%, so of 500 problems (MATH-500, 4-shot "
    "here). The paper does not name its harness; its ARC scores are too low for the usual full-answer "
    "format, so compare ARC between your own rows only.",
)

KV_SHIFT_MMLU = PaperTable(
    title="Table 3 of the KV shifting paper: MMLU",
    source="arXiv 2411.19574",
    columns=(
        Column("Cloze", "mmlu_continuation", "acc"),
        Column("Zero-shot", "mmlu", "acc", 0),
        Column("Few-shot", "mmlu", "acc", 5),
    ),
    average=False,
    rows={
        "Vanilla 2.9B, 500B": (30.41, 33.14, 37.26),
        "KV shift 2.9B, 500B": (32.17, 37.13, 40.88),
    },
    note="Cloze: the answer's text is scored, not its letter. Few-shot: five examples.",
)

PAPERS: dict[str, tuple[PaperTable, ...]] = {
    "paper-gva": (GVA,),
    "paper-kvshift": (KV_SHIFT, KV_SHIFT_MMLU),
}
