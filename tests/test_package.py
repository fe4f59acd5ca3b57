"""A built wheel carries what the commands need, the kernel if it can be built, and works anywhere."""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from keyshift.ops.stream_attention import cpu

ROOT = Path(__file__).resolve().parents[1]
KERNEL = "keyshift/ops/stream_attention/cpu_kernel"
COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(
    COMPILER is None and os.environ.get("CI") != "true", reason="there is no g++ or clang++"
)


def build(folder: Path, **environment: str) -> Path:
    """A wheel of a copy of the checkout, whose own library other tests are running."""
    tree = folder / "tree"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "runs", "*.so")
    )
    (tree / "src" / KERNEL / cpu.LIBRARY.name).write_bytes(b"left behind")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "-w", folder, tree], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def installed(wheel: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """What a command of Python's does with this wheel."""
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True)
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.mark.xdist_group("wheel")
def test_the_wheel_holds_recipes_template_and_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "keyshift/recipes/induction.toml" in names
    assert any(name.endswith("report.html.j2") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


@pytest.mark.xdist_group("wheel")
def test_an_installed_keyshift_compares_away_from_the_checkout(wheel, tmp_path):
    script = "import keyshift, keyshift.cli; print(keyshift.__file__, flush=True); keyshift.cli.main()"
    small = [
        "--steps",
        "3",
        "--seeds",
        "1",
        "--set",
        "model.hidden_size=16",
        "--set",
        "training.batch_size=4",
    ]
    done = installed(wheel, tmp_path, "-c", script, "compare", "induction", *small)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert (tmp_path / "runs/induction/report.html").exists()


STATE = """
from keyshift.ops.stream_attention import cpu
print(cpu.FOLDER, cpu.missing() or list(cpu.kernels()), sep="\\n")
"""


@needs_compiler
@pytest.mark.xdist_group("wheel")
def test_a_wheel_built_with_a_compiler_holds_the_kernel(wheel: Path, tmp_path: Path) -> None:
    assert not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = [f"{KERNEL}/{path.name}" for path in cpu.FOLDER.glob("*.[ch]*")]
    assert len(sources) == 6
    assert {*sources, f"{KERNEL}/{cpu.LIBRARY.name}"} == {name for name in names if name.startswith(KERNEL)}
    folder, state = installed(wheel, tmp_path, "-c", STATE).stdout.splitlines()
    assert folder == str(tmp_path / "site" / KERNEL)
    assert state == str(list(cpu.kernels()))


def test_a_wheel_built_without_a_compiler_is_pure_and_says_what_to_do(tmp_path: Path) -> None:
    wheel = build(tmp_path, CXX="/nonexistent")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    folder, state = installed(wheel, tmp_path, "-c", STATE).stdout.splitlines()
    assert folder == str(tmp_path / "site" / KERNEL)
    assert state.startswith("not compiled; install g++ or clang++, then keyshift again (pip install ")


@pytest.fixture
def compile_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str | None]:
    """Compiles a copy of the kernel with a shell script for a compiler; returns what is wrong."""
    shutil.copytree(cpu.FOLDER, tmp_path / "kernel", ignore=shutil.ignore_patterns("*.so"))
    compile_kernel = runpy.run_path(str(ROOT / "hatch_build.py"))["compile_kernel"]

    def compiled(script: str) -> str | None:
        compiler = tmp_path / "compiler"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        return compile_kernel(tmp_path / "kernel", tmp_path / "kernel" / cpu.LIBRARY.name)

    return compiled


@needs_compiler
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="its instruction sets")
def test_what_a_compiler_does_not_know_is_left_out(
    compile_with: Callable[[str], str | None], tmp_path: Path
) -> None:
    refusing = 'case "$*" in *-mavx512bf16*) echo unknown >&2; exit 1;; esac'
    assert compile_with(f'{refusing}; exec {COMPILER} "$@" -O1') is None
    library = ctypes.CDLL(str(tmp_path / "kernel" / cpu.LIBRARY.name))
    library.keyshift_kernel_name.restype = ctypes.c_char_p
    names = [library.keyshift_kernel_name(index) for index in range(4)]
    assert names == [b"avx512", b"avx2", b"baseline", None]


def test_a_compiler_that_fails_is_quoted(compile_with: Callable[[str], str | None], tmp_path: Path) -> None:
    problem = compile_with("echo no such thing >&2; exit 1")
    assert problem == f"{tmp_path / 'compiler'} failed:\nno such thing\n"
    assert not list((tmp_path / "kernel").glob("*.so*"))


@needs_compiler
def test_a_library_of_other_sources_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(cpu.FOLDER, tmp_path / "kernel")
    monkeypatch.setattr(cpu, "FOLDER", tmp_path / "kernel")
    assert cpu.missing.__wrapped__() is None
    with (tmp_path / "kernel" / "call.h").open("a") as header:
        header.write("// changed\n")
    assert cpu.missing.__wrapped__().startswith("compiled from other sources than those here")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("named", [f"{COMPILER} -m64", f"env {COMPILER}"])
def test_a_compiler_may_be_named_with_arguments(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_kernel = runpy.run_path(str(ROOT / "hatch_build.py"))["compile_kernel"]
    monkeypatch.setenv("CXX", named)
    assert compile_kernel(cpu.FOLDER, tmp_path / "kernel.so") is None
    assert (tmp_path / "kernel.so").exists()


@pytest.mark.parametrize("script", ["no program", "#!/bin/sh\nexit 0"])
def test_a_compiler_that_cannot_work_leaves_a_pure_wheel(script: str, tmp_path: Path) -> None:
    broken = tmp_path / "compiler"
    broken.write_text(script)
    broken.chmod(0o755)
    assert build(tmp_path, CXX=str(broken)).name.endswith("-py3-none-any.whl")
