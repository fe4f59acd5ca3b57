"""Compiles the CPU kernel when the package is built or installed; without a compiler it stays pure Python."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("src/keyshift/ops/stream_attention/cpu_kernel")
LIBRARY = "stream_attention.so"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-pthread"]
AVX512 = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mfma",
    "-mf16c",
    "-mprefer-vector-width=512",
]
INSTRUCTION_SETS: dict[str, list[str]] = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": AVX512,
        "avx512_bf16": [*AVX512, "-mavx512bf16"],
    }


class CompileKernel(BuildHookInterface):
    """Adds the compiled kernel to a wheel, or to the source tree of an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sources = Path(self.root) / SOURCES
        self.scratch = tempfile.TemporaryDirectory()
        library = (sources if version == "editable" else Path(self.scratch.name)) / LIBRARY
        try:
            problem = compile_kernel(sources, library)
        except OSError as error:
            problem = str(error)
        if problem is not None:
            self.app.display_warning(f"keyshift: no CPU kernel, decoding will be slower: {problem}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if version != "editable":
            build_data["force_include"][str(library)] = str(SOURCES.relative_to("src") / LIBRARY)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.scratch.cleanup()


def compile_kernel(folder: Path, library: Path) -> str | None:
    """Build the library from the sources in ``folder``; why not, if it cannot be done.

    The kernel is compiled once for each instruction set that the compiler knows.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    compiler = named or [name for name in ("g++", "clang++") if shutil.which(name)][:1]
    if not compiler or shutil.which(compiler[0]) is None:
        return f"CXX={' '.join(named)!r} is not there" if named else "there is no g++ or clang++"
    digest = hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]*")))
    ).hexdigest()
    with tempfile.TemporaryDirectory() as scratch:
        objects, known = [], []
        for name, flags in INSTRUCTION_SETS.items():
            target = str(Path(scratch) / f"{name}.o")
            source = [str(folder / "kernel.cpp"), f"-DKEYSHIFT_ISA={name}", "-c", "-o", target]
            done = subprocess.run([*compiler, *FLAGS, *flags, *source], capture_output=True, text=True)
            if done.returncode == 0:
                objects.append(target)
                known.append(f"-DKEYSHIFT_HAS_{name}")
            elif name == "baseline":
                return f"{compiler[0]} failed:\n{done.stderr}"
        built = Path(scratch) / LIBRARY
        defines = [*known, f'-DKEYSHIFT_DIGEST="{digest}"']
        link = [*FLAGS, *defines, "-shared", str(folder / "dispatch.cpp"), *objects, "-o", str(built)]
        done = subprocess.run([*compiler, *link], capture_output=True, text=True)
        if done.returncode:
            return f"{compiler[0]} failed:\n{done.stderr}"
        waiting = library.with_suffix(".so.new")
        shutil.copy2(built, waiting)
        waiting.replace(library)
    return None
