"""The Triton backend without a GPU: interpreted on the CPU, and compiled for GPUs that are not there.

Whether kernels are interpreted is decided when triton is imported. So a run under TRITON_INTERPRET=1 sees the
one half of this module; an ordinary run sees the other, and starts the first in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Call, begin_alike, calls, decoding, fresh_memory_of_nan, in_float64, paged, poison
from torch import Tensor

from keyshift.ops.stream_attention import stream_attention
from keyshift.ops.stream_attention import triton as backend
from keyshift.ops.stream_attention.quantised import quantise

triton = pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ordinary = pytest.mark.skipif(INTERPRETED, reason="belongs to the run that is not interpreted")


@dataclass(frozen=True)
class Target:
    """A GPU to compile for, as Triton names it, with an index of no real one."""

    index: int
    backend: str
    arch: int | str
    lanes: int
    machine: backend.Machine


TARGETS = {
    "sm_80": Target(1000, "cuda", 80, 32, backend.Machine(processors=108, shared_bytes=163 << 10, hip=False)),
    "sm_90": Target(1001, "cuda", 90, 32, backend.Machine(processors=132, shared_bytes=227 << 10, hip=False)),
    "gfx942": Target(
        2, "hip", "gfx942", 64, backend.Machine(processors=304, shared_bytes=64 << 10, hip=True)
    ),
}


def compare(call: Call) -> None:
    """With the definition in double precision, as closely as weights and output can be rounded."""
    with fresh_memory_of_nan():
        out = stream_attention(**call, backend="triton")
    exact = stream_attention(**in_float64(call), backend="reference")
    values = call["keys_BGTS"] if call["values_BGTV"] is None else call["values_BGTV"]
    largest = (values if values.is_floating_point() else exact).nan_to_num(posinf=0, neginf=0).abs().max()
    mixed = call["value_weights_HW"].abs().sum(1).max() if "value_weights_HW" in call else 1
    eps = torch.finfo(out.dtype).eps * (100 if out.dtype == torch.float32 else 1)
    assert out.dtype == call["queries"].dtype
    atol = float(eps * largest * mixed)
    torch.testing.assert_close(out.double(), exact, rtol=eps, atol=atol, equal_nan=True)


class TestInterpreted:
    """Against the definition."""

    __test__ = INTERPRETED

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def interpreter(cls) -> Iterator[None]:
        """Splits of single blocks; and products of bfloat16, of which the interpreter multiplies the bits."""
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        dot = InterpreterBuilder.create_dot

        def in_float32(operand: TensorHandle) -> TensorHandle:
            if operand.dtype.scalar != triton.language.bfloat16:
                return operand
            bits = operand.data.astype("uint32") << 16
            return TensorHandle(bits.view("float32"), triton.language.float32)

        def mended(self: Any, a: TensorHandle, b: TensorHandle, *others: Any) -> TensorHandle:
            return dot(self, in_float32(a), in_float32(b), *others)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "LEAST_BLOCKS", 1)
            patch.setattr(backend, "NOT_INTERPRETED", ())
            patch.setattr(InterpreterBuilder, "create_dot", mended)
            yield

    @given(calls(dtype=torch.float32, most_slots=50))
    @settings(max_examples=60, deadline=None)
    def test_random_calls(self, call: Call) -> None:
        compare(call)

    @given(calls(dtype=torch.float32, most_slots=50, quantised=True))
    @settings(max_examples=50, deadline=None)
    def test_random_quantised_calls(self, call: Call) -> None:
        compare(call)

    @given(
        call=st.booleans().flatmap(lambda q: calls(dtype=torch.float32, most_slots=50, quantised=q)),
        page=st.sampled_from((1, 3, 16, 24, 128)),
        alike=st.integers(0, 50),
        seed=st.integers(0, 9),
    )
    @settings(max_examples=50, deadline=None)
    def test_random_calls_over_pages(self, call: Call, page: int, alike: int, seed: int) -> None:
        begin_alike(call, alike)
        compare(paged(call, page, seed=seed))

    @given(st.sampled_from((torch.bfloat16, torch.float16)).flatmap(lambda dtype: calls(dtype=dtype)))
    @settings(max_examples=40, deadline=None)
    def test_random_calls_in_half_precision(self, call: Call) -> None:
        compare(call)

    @given(calls(dtype=torch.float32, most_slots=20, most_queries=30, most_width=20))
    @settings(max_examples=15, deadline=None)
    def test_many_new_tokens_and_odd_widths(self, call: Call) -> None:
        compare(call)

    @pytest.mark.parametrize("window", [1, 2, 9])
    @pytest.mark.parametrize("total", [1, 15, 16, 17, 48, 100])
    def test_across_the_borders_of_blocks_and_splits(self, total: int, window: int) -> None:
        call = decoding(heads=4, groups=2, width=8, rotary=4, total=total, window=window)
        compare(call)
        call["starts_BQ"] = torch.tensor([[total // 2], [0]], dtype=torch.int32)
        call["lengths_B"] = torch.tensor([total, 1])
        poison(call)
        compare(call)
        turned = torch.randn(2, 1, window, 4, 8).transpose(1, 3)
        call = {**call, "queries": turned, "values_BGTV": 1 - call["keys_BGTS"][..., :5]}
        call.pop("key_weights_HW", None)
        compare(call)

    @pytest.mark.parametrize(
        ("dtype", "quantised"),
        [
            (torch.float32, None),
            (torch.bfloat16, None),
            (torch.float16, None),
            (torch.float32, torch.int8),
            (torch.bfloat16, torch.uint8),
        ],
    )
    def test_gva_in_the_tile_of_a_real_machine(
        self, dtype: torch.dtype, quantised: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backend, "machine", lambda device: TARGETS["sm_90"].machine)
        call = decoding(total=300, window=2, batch=1, dtype=dtype)
        if quantised is not None:
            call["keys_BGTS"], call["key_scales_BGTN"] = quantise(call["keys_BGTS"], quantised, 4, dtype)
        compare(call)

    def test_mla_in_the_tile_of_a_real_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "machine", lambda device: TARGETS["sm_90"].machine)
        compare(decoding(groups=1, width=512, rotary=64, total=200, window=1, batch=1))

    @pytest.mark.parametrize("stream", ["keys_BGTS", "rope_keys_BTR"])
    def test_visible_nan_comes_out(self, stream: str) -> None:
        call = decoding(heads=4, groups=1, width=8, rotary=4, total=40, window=2)
        call[stream][0, ..., 20, 0] = torch.nan
        out = stream_attention(**call, backend="triton")
        assert out[0].isnan().any(-1).all()
        assert not out[1].isnan().any()

    def test_rows_whose_scores_are_all_minus_infinity(self) -> None:
        call = decoding(heads=2, groups=2, width=2, rotary=0, total=40, window=1, batch=1)
        call["queries"].fill_(1)
        call["keys_BGTS"][0, 0] = -torch.inf
        call["keys_BGTS"][0, 1, :30] = -torch.inf
        call["values_BGTV"] = torch.randn(1, 2, 40, 3)
        compare(call)

    def test_refuses_double_precision(self) -> None:
        call = in_float64(decoding(total=5, window=1))
        with pytest.raises(ValueError, match=r"backend='triton' takes cpu tensors of .*, not torch.float64"):
            stream_attention(**call, backend="triton")

    def test_refuses_what_the_interpreter_gets_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "NOT_INTERPRETED", (torch.bfloat16,))
        call = decoding(total=5, window=1, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"takes cpu tensors of .*, not torch\.bfloat16"):
            stream_attention(**call, backend="triton")


@ordinary
def test_interpreted() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout


def benchmark(**environment: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parents[1] / "benchmarks" / "gpu_decode.py"
    command = [sys.executable, str(script), "--quick", "--threads", "1"]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


@ordinary
def test_the_benchmark_interpreted() -> None:
    done = benchmark(TRITON_INTERPRET="1")
    assert done.returncode == 1, done.stderr  # its bars on speed are for GPUs
    checks = json.loads(done.stdout.splitlines()[-1])["checks"]
    assert len(checks) == 9
    assert all(check["ok"] for check in checks if check["name"].startswith("error"))


@ordinary
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_without_a_gpu() -> None:
    done = benchmark()
    assert (done.returncode, done.stderr) == (2, "gpu_decode: there is no GPU\n")


@ordinary
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@given(
    st.sampled_from(backend.DTYPES).flatmap(lambda dtype: calls(dtype=dtype, most_slots=300, most_width=40))
)
@settings(max_examples=60, deadline=None)
def test_random_calls_on_a_gpu(call: Call) -> None:
    for each in (call, paged(call, 24)):
        compare({name: value.cuda() if isinstance(value, Tensor) else value for name, value in each.items()})


@ordinary
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="backend='triton' is not on this machine: there is no GPU"):
        stream_attention(**decoding(total=5, window=1), backend="triton")


@ordinary
def test_triton_is_imported_only_to_run() -> None:
    program = (
        "import sys, torch\n"
        "from keyshift.ops.stream_attention import triton\n"
        "triton.missing(), triton.refused(torch.zeros(1))\n"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@dataclass(frozen=True)
class Absent:
    """Triton's driver of a GPU that is not there."""

    target: Target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.target.backend, self.target.arch, self.target.lanes)

    def get_current_device(self) -> int:
        return self.target.index

    def get_current_stream(self, device: int) -> int:
        return 0


def served(**sizes: Any) -> Call:
    """A call of decoding in bfloat16, with nothing in it."""
    call = decoding(**sizes, total=512, batch=8, dtype=torch.bfloat16)
    call = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in call.items()}
    return {**call, "lengths_B": torch.empty(8, dtype=torch.int64, device="meta")}


def shifted_gqa() -> Call:
    """Keys that carry a rotation: the queries have a step for each place of the window."""
    call = served(rotary=0, window=2)
    del call["key_weights_HW"]
    return {**call, "queries": torch.stack([call["queries"]] * 2, 2), "values_BGTV": call["keys_BGTS"]}


def quantised(call: Call, dtype: torch.dtype) -> Call:
    stream = call["keys_BGTS"]
    integers = stream[..., : stream.shape[-1] // 2] if dtype == torch.uint8 else stream
    return {**call, "keys_BGTS": integers.to(dtype), "key_scales_BGTN": stream[..., :1]}


def in_pages(call: Call, page: int) -> Call:
    """Token by token, with nothing in them."""
    pages = {
        name: call[name].new_empty(999, page, call[name].shape[1], call[name].shape[-1]).transpose(1, 2)
        for name in ("keys_BGTS", "key_scales_BGTN")
        if name in call
    }
    rope = call["rope_keys_BTR"].new_empty(999, page, call["rope_keys_BTR"].shape[-1])
    tables = torch.empty(8, 512 // page, dtype=torch.int32, device="meta")
    return {**call, **pages, "rope_keys_BTR": rope, "block_tables_BP": tables}


CASES: dict[str, Callable[[], Call]] = {
    "GVA": lambda: served(window=1),
    "shifted GVA": lambda: served(window=2),
    "shifted GVA, 8 new tokens": lambda: served(window=2, new=8),
    "shifted GVA, 8 bits": lambda: quantised(served(window=2), torch.int8),
    "shifted GVA, 4 bits": lambda: quantised(served(window=2), torch.uint8),
    "shifted GVA, pages of 16": lambda: in_pages(served(window=2), 16),
    "shifted GVA, pages of 24": lambda: in_pages(served(window=2), 24),
    "shifted GVA, 8 bits, pages of 16": lambda: in_pages(quantised(served(window=2), torch.int8), 16),
    "shifted GQA": shifted_gqa,
    "MLA": lambda: served(groups=1, width=512, rotary=64, window=1),
    "MLA, 8 bits": lambda: quantised(served(groups=1, width=512, rotary=64, window=1), torch.int8),
}
OPTIONS = (
    "starts_BQ",
    "lengths_B",
    "rope_queries_BHQR",
    "rope_keys_BTR",
    "key_weights_HW",
    "value_weights_HW",
    "slopes_H",
    "key_scales_BGTN",
    "value_scales_BGTN",
    "block_tables_BP",
)


@ordinary
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TARGETS)
def test_compiles_without_spills_and_fits(
    name: str, case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What `run` would launch: the same kernels, tiles and specialisations, compiled instead of launched."""
    from triton.runtime import JITFunction, driver

    target, launch, compiled = TARGETS[name], JITFunction.run, []

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        compiled.append(launch(self, *arguments, warmup=True, **options))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Absent(target))
    monkeypatch.setattr(backend, "machine", lambda device: target.machine)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    backend.run(**{**dict.fromkeys(OPTIONS), **CASES[case]()})
    assert len(compiled) == 2
    for kernel in compiled:
        assert spilled_bytes(kernel) == 0
        assert kernel.metadata.shared <= target.machine.shared_bytes


def spilled_bytes(kernel: Any) -> int:
    """Of registers: to memory, or on AMD's GPUs also to lanes of other registers."""
    if kernel.metadata.target.backend == "hip":
        kinds = "sgpr_spill_count|vgpr_spill_count|private_segment_fixed_size"
        found = re.findall(rf"\.(?:{kinds}):\s+(\d+)", kernel.asm["amdgcn"])
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(kernel.asm["cubin"])
            cubin.flush()
            tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
            usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    assert found
    return sum(map(int, found))
