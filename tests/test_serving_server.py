"""vLLM's server with the plugin and a small trained checkpoint, asked by the real client."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import in_process
from served import greedy
from texts import sentences, write
from transformers import AutoTokenizer

from keyshift import KeyshiftForCausalLM

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")
openai = pytest.importorskip("openai")

RECIPE = """
title = "A checkpoint to serve"
seeds = 1
[data]
vocab_size = 400
sequence_length = 128
[training]
steps = 200
batch_size = 16
learning_rate = 5e-3
warmup_steps = 20
eval_steps = 200
eval_batches = 2
[model]
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 128
qk_rope_head_dim = 8
max_position_embeddings = 512
[variants."GVA + shift"]
attention = "gva"
position = "decoupled_rope"
shift = "kv"
"""
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}assistant: {% endif %}"
BUDGET = 64
"""Tokens of a step: a longer prompt is read in chunks."""
PATIENCE = 300.0
WHOLE = {"ignore_eos": True, "return_token_ids": True}


class Served:
    """A running server and the checkpoint that it serves, opened here too."""

    def __init__(self, process: subprocess.Popen[str], port: int, folder: Path):
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        )
        self.model = KeyshiftForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        """So many tokens of text of the kind that the model was trained on."""
        return self.tokenizer(" ".join(sentences(120, seed)))["input_ids"][:tokens]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return greedy(self.model, prompt, count)

    def complete(self, prompt: Any, count: int, **options: Any) -> Any:
        return self.client.completions.create(
            model="keyshift", prompt=prompt, max_tokens=count, temperature=0, extra_body=WHOLE, **options
        )

    def running(self) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics") as page:
            lines = page.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running")
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shifted GVA model, trained here for some seconds, with a chat template."""
    root = tmp_path_factory.mktemp("trained")
    recipe = write(root / "recipe.toml", RECIPE)
    text = write(root / "text" / "a.txt", "\n\n".join(sentences(4000)))
    done = in_process("train", recipe, text, "--out", root / "out", cwd=root)
    assert done.returncode == 0, done.stderr
    (found,) = (root / "out").rglob("checkpoint-200")
    tokenizer = AutoTokenizer.from_pretrained(found)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(found)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "log"
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "keyshift", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--block-size", "16", "--max-num-batched-tokens", str(BUDGET)]
    command += ["--max-num-seqs", "40", "--enable-prompt-tokens-details"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment)
    try:
        wait_for(process, port, log)
        yield Served(process, port, folder)
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in (process, *left):
            each.kill()
        process.wait()


def wait_for(process: subprocess.Popen[str], port: int, log: Path) -> None:
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def test_a_completion_is_what_generate_says(served: Served) -> None:
    prompt = served.prompt(20)
    choice = served.complete(prompt, 40).choices[0]
    expected = served.greedy(prompt, 40)
    assert choice.token_ids == expected
    assert choice.text == served.text(expected)
    assert choice.finish_reason == "length"


def test_a_prompt_longer_than_a_step_is_read_in_chunks(served: Served) -> None:
    prompt = served.prompt(5 * BUDGET + 7, seed=1)
    assert len(prompt) > 5 * BUDGET
    assert served.complete(prompt, 20).choices[0].token_ids == served.greedy(prompt, 20)


def test_a_conversation_goes_through_the_template(served: Served) -> None:
    messages = [{"role": "user", "content": "12: abc"}]
    answer = served.client.chat.completions.create(
        model="keyshift", messages=messages, max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
    )
    rendered = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = served.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.content == served.text(served.greedy(ids, 30))


def test_a_stream_adds_up_to_the_whole(served: Served) -> None:
    prompt = served.prompt(30, seed=2)
    pieces = [each.choices[0].text for each in served.complete(prompt, 40, stream=True) if each.choices]
    assert len(pieces) > 5
    assert "".join(pieces) == served.text(served.greedy(prompt, 40))


def test_log_probabilities_are_the_models(served: Served) -> None:
    prompt = served.prompt(25, seed=3)
    found = served.complete(prompt, 10, logprobs=2).choices[0].logprobs.token_logprobs
    ids = served.greedy(prompt, 10)
    with torch.inference_mode():
        logits = served.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(10), torch.tensor(ids)]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


def test_it_stops_before_a_stop_string(served: Served) -> None:
    prompt = served.prompt(20, seed=4)
    whole = served.text(served.greedy(prompt, 60))
    stop = whole[20:24]
    choice = served.complete(prompt, 60, stop=[stop]).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_several_answers_to_one_prompt(served: Served) -> None:
    """Drawn from the likeliest token alone they are all greedy; drawn freely they differ."""
    prompt = served.prompt(40, seed=5)
    options = {"model": "keyshift", "prompt": prompt, "max_tokens": 20, "n": 3, "temperature": 1.0}
    alike = served.client.completions.create(**options, extra_body={**WHOLE, "top_k": 1})
    assert [each.token_ids for each in alike.choices] == [served.greedy(prompt, 20)] * 3
    free = served.client.completions.create(**options, seed=0, extra_body=WHOLE)
    assert len({tuple(each.token_ids) for each in free.choices}) > 1


def test_a_prefix_that_was_seen_is_not_computed_again(served: Served) -> None:
    prompt = served.prompt(100, seed=6)
    first = served.complete(prompt, 20)
    longer = [*prompt[:90], *served.prompt(30, seed=7)]
    again = served.complete(longer, 20)
    assert not first.usage.prompt_tokens_details or not first.usage.prompt_tokens_details.cached_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == 80
    assert again.choices[0].token_ids == served.greedy(longer, 20)


def test_many_requests_at_once(served: Served) -> None:
    requests = [(served.prompt(1 + 9 * number, seed=number), 5 + number) for number in range(32)]

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        ) as client:
            return await asyncio.gather(
                *(
                    client.completions.create(
                        model="keyshift", prompt=prompt, max_tokens=count, temperature=0, extra_body=WHOLE
                    )
                    for prompt, count in requests
                )
            )

    for (prompt, count), answer in zip(requests, asyncio.run(ask()), strict=True):
        assert answer.choices[0].token_ids == served.greedy(prompt, count)


def test_an_abandoned_stream_stops_and_the_others_go_on(served: Served) -> None:
    prompt = served.prompt(30, seed=8)
    stream = served.complete(prompt, 400, stream=True)
    next(iter(stream))
    assert served.running() == 1
    stream.close()
    ends = time.monotonic() + 20
    while served.running() and time.monotonic() < ends:
        time.sleep(0.1)
    assert served.running() == 0
    assert served.complete(prompt, 20).choices[0].token_ids == served.greedy(prompt, 20)


def test_a_prompt_that_is_too_long_is_the_askers_mistake(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        served.complete([5] * 513, 1)
    assert caught.value.status_code == 400
    assert "512" in str(caught.value)


def test_the_server_ends_when_it_is_told_to(served: Served) -> None:
    """The last of this file: nothing is left of it."""
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert children
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) in (0, -signal.SIGTERM)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
