"""What the plugin says where vLLM is missing or another version than the one it knows."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from keyshift import vllm_plugin as plugin
from keyshift.errors import RunError

ROOT = Path(__file__).parents[1]


def there() -> bool:
    for name in plugin.DISTRIBUTIONS:
        try:
            version(name)
            return True
        except PackageNotFoundError:
            continue
    return False


def pretend(folder: Path, number: str) -> None:
    """A distribution of that version, as an installer leaves it."""
    info = folder / f"vllm-{number}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")


def test_vllm_finds_it() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="keyshift")
    assert found.load() is plugin.register


def test_the_extra_asks_for_the_versions_that_are_supported() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = map(Requirement, extras["vllm"])
    assert requirement.specifier == plugin.SUPPORTED


@pytest.mark.skipif(there(), reason="vLLM is installed")
def test_without_vllm_it_says_what_to_install() -> None:
    with pytest.raises(RunError, match=r"needs vLLM: pip install keyshift\[vllm\]"):
        plugin.check()
    done = subprocess.run(
        [sys.executable, "-c", "import keyshift.serving.model"], capture_output=True, text=True
    )
    assert done.returncode
    assert "keyshift[vllm]" in done.stderr.splitlines()[-1]


def own(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the plugin said; vLLM warns too, when it is first imported."""
    return [record for record in caplog.records if record.name == plugin.logger.name]


@pytest.mark.parametrize("number", ["0.31.2", "0.33.0", "1.0"])
def test_another_version_is_named_and_leaves_vllm_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: str
) -> None:
    pretend(tmp_path, number)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RunError, match=f"vLLM {number} is installed and keyshift"):
        plugin.check()
    with caplog.at_level(logging.WARNING):
        plugin.register()
    (record,) = own(caplog)
    assert "\n" not in record.getMessage()
    assert f"vLLM {number}" in record.getMessage()
    assert ">=0.32" in record.getMessage()


def test_whatever_fails_leaves_vllm_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM would stop on any exception, whichever model it was to serve."""
    if not there():
        pretend(tmp_path, "0.32.0")
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "keyshift.configuration", None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    (record,) = own(caplog)
    assert record.getMessage().startswith("keyshift checkpoints cannot be served:")
