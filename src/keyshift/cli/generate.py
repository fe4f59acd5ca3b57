"""``keyshift generate``: a prompt continued, or a conversation, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import Interruption, print_json, size
from keyshift.errors import UserError

if TYPE_CHECKING:
    from keyshift.generation import Answer, Message


@app.command()
def generate(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint folder or hub name of any causal language model.")
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text. Without it: a conversation, line by line, or what is piped in."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text, also where there is a chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="What a conversation begins with.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens that make up this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    cache_dtype: Annotated[
        str | None, typer.Option(help="int8 or int4: round what is cached (keyshift models).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, … auto: the GPU if there is one.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16. auto: as the checkpoint was saved.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print text and numbers as JSON.")] = False,
) -> None:
    """Continue a text or answer, token by token, from the model's own small cache."""
    from keyshift.generation import Sampling, answer, prompt_ids
    from keyshift.opened import open_checkpoint

    console = Console(stderr=True, highlight=False)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed, cache_dtype)
    sampling.check()
    opened = open_checkpoint(checkpoint, device, dtype)
    chat = opened.tokenizer.chat_template is not None and not raw
    if system is not None and not chat:
        raise UserError(f"--system={system!r} begins a conversation, and this is none; leave it out")
    talk: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    write = (lambda text: None) if as_json else _write
    for text in _turns(prompt):
        talk.append({"role": "user", "content": text})
        with Interruption() as stop:
            given = answer(
                opened, prompt_ids(opened, talk if chat else text), sampling, write=write, stop=stop
            )
        talk.append({"role": "assistant", "content": given.text})
        if as_json:
            print_json({**vars(given), "tokens_per_second": given.tokens_per_second})
        else:
            _write("\n")
            console.print(_facts(given), style="dim", soft_wrap=True)


def _turns(prompt: str | None) -> Iterator[str]:
    """What is said: the prompt, or all that is piped in, or lines until an empty one."""
    if prompt is not None:
        yield prompt
    elif not sys.stdin.isatty():
        yield sys.stdin.read()
    else:
        while text := _line():
            yield text


def _line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _write(text: str) -> None:
    typer.echo(text, nl=False)


def _facts(given: Answer) -> str:
    rate = given.tokens_per_second
    facts = [f"{given.prompt_tokens} + {given.new_tokens} tokens", f"first after {given.first_seconds:.2f} s"]
    if rate is not None:
        facts.append(f"then {rate:,.0f} tokens/s")
    return ", ".join([*facts, f"cache {size(given.cache_bytes)}"])
