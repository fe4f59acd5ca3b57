"""The code that a checkpoint carries: this package's own sources as flat files, for transformers alone.

transformers copies a file of a repository and what it imports from beside it, no folders. So every module
that the model needs becomes a file like ``keyshift_attention_shift.py``, its imports of the package relative
ones. Nothing else changes but what `CHANGES` names. The entry, `ENTRY`, takes the installed package where
there is one, as transformers itself does once it was imported: one model class in a process, and its kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import keyshift

ENTRY = "modeling_keyshift"
AUTO_CLASSES = {
    "AutoConfig": ("configuration", "KeyshiftConfig"),
    "AutoModel": ("modeling", "KeyshiftModel"),
    "AutoModelForCausalLM": ("modeling", "KeyshiftForCausalLM"),
}
"""What transformers loads, the module of the package that it is in, and its name."""
AUTO_MAP = {auto: f"{ENTRY}.{name}" for auto, (_, name) in AUTO_CLASSES.items()}
"""The key of config.json that leads transformers to the code. All from one file: two would be two copies."""

ROOT = Path(keyshift.__file__).parent
IMPORT = re.compile(r"^( *)from keyshift\.([\w.]+) import ", re.MULTILINE)
ANY_IMPORT = re.compile(r"^ *(?:from|import) +keyshift\b", re.MULTILINE)
CHANGES = {
    "configuration": (r"^AutoConfig\.register\(.*\)\n", ""),  # transformers registers what it loads
    "modeling": (r"^(?:Auto\w+\.register\(.*\)\n)+", ""),
    "ops.stream_attention.backends": (r"^BACKENDS = \(.*\)$", 'BACKENDS = ("reference",)'),  # no kernels here
}
"""By module: what is replaced once, a pattern, and what stands there instead."""


def carried_files() -> dict[str, str]:
    """File names and contents. Python alone, which transformers runs with ``trust_remote_code=True``."""
    files = {f"{ENTRY}.py": _entry()}
    waiting = sorted({module for module, _ in AUTO_CLASSES.values()})
    while waiting:
        module = waiting.pop()
        if _file(module) not in files:
            source = _source(module)
            files[_file(module)] = _flattened(module, source)
            waiting += [match[2] for match in IMPORT.finditer(source)]
    return dict(sorted(files.items()))


def _entry() -> str:
    imports = list(_entry_imports())
    package, copies = ("\n".join(f"    {line}" for line in each) for each in zip(*imports, strict=True))
    about = (
        "What transformers loads: the installed package, where there is one, else the files beside this one."
    )
    header = _header("hub/carried.py")
    return f'{header}"""{about}"""\n\ntry:\n{package}\nexcept ImportError:\n{copies}\n'


def _entry_imports() -> Iterator[tuple[str, str]]:
    for module, name in AUTO_CLASSES.values():
        yield f"from keyshift.{module} import {name}", f"from .{_stem(module)} import {name}"


def _source(module: str) -> str:
    path = ROOT.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


def _flattened(module: str, source: str) -> str:
    """A module's source as the file beside its neighbours."""
    if module in CHANGES:
        pattern, replacement = CHANGES[module]
        source, count = re.subn(pattern, replacement, source, flags=re.MULTILINE)
        assert count == 1, f"keyshift.{module}: {pattern} is there {count} times"
    source = IMPORT.sub(lambda match: f"{match[1]}from .{_stem(match[2])} import ", source)
    left = ANY_IMPORT.search(source)
    assert left is None, f"keyshift.{module}: {left} is not of the form that can be carried"
    return _header(f"{module.replace('.', '/')}.py") + source


def _header(origin: str) -> str:
    return (
        f"# From keyshift {keyshift.__version__}, {origin}, by `keyshift push`. Not to be edited.\n"
        "# SPDX-License-Identifier: Apache-2.0\n"
    )


def _stem(module: str) -> str:
    return f"keyshift_{module.replace('.', '_')}"


def _file(module: str) -> str:
    return f"{_stem(module)}.py"
