"""What `keyshift doctor` prints: the backends of every operation, which are here, and why others are not."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keyshift.ops.stream_attention.backends import BACKENDS, module

Row = dict[str, Any]


def backend_rows() -> list[Row]:
    """One row per backend: ``operation``, ``backend``, ``available``, ``detail`` (what it is, or why not)."""
    rows = []
    for name in BACKENDS:
        backend = module(name)
        reason = backend.missing()
        detail = backend.detail() if reason is None else reason
        rows.append(
            {
                "operation": "stream_attention",
                "backend": name,
                "available": reason is None,
                "detail": detail,
            }
        )
    return rows


def print_backends(rows: list[Row], console: Console) -> None:
    """The table, within 80 columns, and what decoding uses."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("backend", "here", "detail"):
        table.add_column(header)
    for row in rows:
        table.add_row(row["backend"], "yes" if row["available"] else "no", escape(row["detail"]))
    console.print(table)
    console.print()
    for device, name in (("cpu", "CPU"), ("cuda", "GPU")):
        if device == "cpu" or torch.cuda.is_available():
            queries = torch.empty(1, device=device)
            here = (row["backend"] for row in rows if row["available"])
            chosen = next(backend for backend in here if module(backend).refused(queries) is None)
            console.print(f"generate() decodes on the {name} with: {chosen}")
