"""``keyshift convert``: a checkpoint of another library as a keyshift model, and back; another mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import byte_progress, print_json, size
from keyshift.errors import UserError

if TYPE_CHECKING:
    from keyshift.convert import Plan


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A checkpoint folder or hub name: llama, qwen3, keyshift, …"),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")],
    shift: Annotated[
        str, typer.Option(help="Put in KV shifting that does nothing yet: kv, k or v.")
    ] = "none",
    attention: Annotated[
        str, typer.Option(help="same; gva: cache values alone; mla: one latent, fitted on --text.")
    ] = "same",
    text: Annotated[
        Path | None, typer.Option(help="For gva, mla: text to fit and measure on, files or a store.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="For gva, mla: how much of the text.")] = 65_536,
    rope_width: Annotated[
        int | None, typer.Option(help="For gva, mla: width of the rotary key. Default: half of a head.")
    ] = None,
    latent_width: Annotated[
        int | None, typer.Option(help="For mla: width of the latent. Default: as many bytes as gva.")
    ] = None,
    to: Annotated[
        str, typer.Option(help="keyshift; original: back to where it came from; or an architecture.")
    ] = "keyshift",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Make a checkpoint into a keyshift model with the same logits, or back; or give it a smaller cache."""
    from keyshift.convert import check_new, plan

    console = Console(stderr=as_json, highlight=False)
    if attention not in ("same", "gva", "mla"):
        raise UserError(f"--attention {attention} is not known; use same, gva or mla")
    if attention != "same" and (text is None or to != "keyshift"):
        raise UserError(f"--attention {attention} fits a keyshift model on text: pass --text, and no --to")
    if latent_width is not None and attention != "mla":
        raise UserError(f"--latent-width {latent_width} is for --attention mla; leave it out")
    widths: dict[str, Any] = {
        "attention": attention,
        "rope_width": rope_width,
        "latent_width": latent_width,
        "shift": shift,
    }
    check_new(destination)
    planned = plan(source, to=to, shift=shift if attention == "same" else "none")
    if attention == "same":
        needs = planned.needs()
    else:
        from keyshift.convert import mechanism
        from keyshift.convert.conversion import check_disk
        from keyshift.corpus import check_text

        assert text is not None
        check_text([text])
        needs = mechanism.needs(planned, mechanism.target_of(planned.target, **widths))
        check_disk(needs["disk_bytes"], destination.expanduser())
    if not as_json:
        console.print(*_lines(needs, attention), sep="\n", soft_wrap=True)
    if dry_run:
        done = {}
    elif attention == "same":
        done = _renamed(planned, destination, console)
    else:
        assert text is not None
        done = _adapted(planned, destination, console, text, tokens, widths)
    if as_json:
        print_json({**needs, **done})
    elif done:
        console.print(*_outcome(done), sep="\n", soft_wrap=True)


def _renamed(planned: Plan, destination: Path, console: Console) -> dict[str, Any]:
    from keyshift.convert import convert as converted

    with byte_progress(console) as progress:
        difference = converted(planned, destination, progress)
    return {"checkpoint": str(destination), "logits_difference": difference}


def _adapted(
    planned: Plan,
    destination: Path,
    console: Console,
    text: Path,
    tokens: int,
    widths: dict[str, Any],
) -> dict[str, Any]:
    from keyshift.convert.mechanism import adapt, write
    from keyshift.progress import stages

    with stages(console) as progress:
        adapted = adapt(planned, text, tokens=tokens, progress=progress, **widths)
        write(adapted, planned, destination)
    return {"checkpoint": str(destination), **adapted.numbers()}


def _lines(needs: dict[str, Any], attention: str) -> list[str]:
    if attention != "same":
        return [
            f"{needs['from']} to {attention}: {needs['parameters']:,} parameters",
            f"disk {size(needs['disk_bytes'])}, "
            f"memory {size(needs['memory_bytes'])} for both models and what they are fitted with",
        ]
    added = f", {needs['added_parameters']:,} of them new" if needs["added_parameters"] else ""
    return [
        f"{needs['from']} to {needs['to']}: {needs['parameters']:,} parameters{added}",
        f"disk {size(needs['disk_bytes'])}, memory {size(needs['memory_bytes'])} at a time, "
        f"{size(needs['compare_bytes'])} to compare logits",
    ]


def _outcome(done: dict[str, Any]) -> list[str]:
    if "perplexity_after" in done:
        errors = done["layer_errors"]
        before, after = done["bytes_before"], done["bytes_after"]
        facts = [
            f"cache: {before:,} to {after:,} bytes a token in bfloat16, {after / before:.3f} of it",
            f"perplexity: {done['perplexity_before']:.2f} before, {done['perplexity_after']:.2f} after, "
            "not trained yet",
            f"attention outputs are off by {min(errors):.1%} to {max(errors):.1%}; by layer:",
            " ".join(f"{error:.3f}" for error in errors),
        ]
    elif done["logits_difference"] is None:
        facts = ["logits: not compared, for which the free memory is too small"]
    else:
        difference = done["logits_difference"]
        exact = (
            "equal to the last bit" if difference == 0 else f"largest relative difference {difference:.1e}"
        )
        facts = [f"logits: {exact}, in float32 on random tokens"]
    return [*facts, f"checkpoint: {done['checkpoint']}"]
