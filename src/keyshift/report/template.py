"""Pages are written from templates; this finds them and fills them in."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def fill(template: Path, **values: Any) -> str:
    """The page of ``template``, which may use the templates beside it and those of this folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(values)
