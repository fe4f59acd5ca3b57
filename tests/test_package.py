"""A built wheel carries what the commands need, and works away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        ROOT,
    ]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_recipes_template_and_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "keyshift/recipes/induction.toml" in names
    assert any(name.endswith("report.html.j2") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


def test_an_installed_keyshift_compares_away_from_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True)
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
    done = subprocess.run(
        [sys.executable, "-c", script, "compare", "induction", *small],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    assert (tmp_path / "runs/induction/report.html").exists()
