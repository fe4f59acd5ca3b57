"""What ``keyshift theory`` does: measure, put into words, write the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from keyshift.errors import UserError
from keyshift.provenance import command_line, environment, moment
from keyshift.theory import checks, flow, init_scale, logits, one_layer, simulation, two_layers
from keyshift.theory.report import write_theory
from keyshift.theory.results import TheoryReport

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how many measurements are done, and of how many."""


def check_theory(directory: Path, progress: Progress) -> TheoryReport:
    """Check every theorem and write ``theory.json``, ``theory.html`` and ``figures/``.

    Raises:
        UserError: a folder that cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        report = measure(progress)
        write_theory(report, directory)
    except OSError as error:
        raise UserError(
            f"out={directory} cannot be written ({error.strerror}); pass another --out"
        ) from error
    return report


def measure(progress: Progress) -> TheoryReport:
    """All measurements; the same numbers each time but for the clock, the machine and rounding."""
    began, steps = time.perf_counter(), 7

    progress("Theorem 1", 0, steps)
    copies = [error for name in two_layers.CONSTRUCTIONS for error in two_layers.copy_errors(name)]
    progress("Theorem 2", 1, steps)
    shifted = one_layer.shifted_errors()
    progress("Theorem 3", 2, steps)
    simulations = simulation.simulate()
    progress("gradient flow", 3, steps)
    landscapes = [flow.survey(others) for others in flow.OTHERS]
    progress("identities", 4, steps)
    identities = [*checks.shift_and_position(), *checks.absorbed_keys()]
    progress("scale of logits", 5, steps)
    scales = logits.sweep()
    progress("models before training", 6, steps)
    starts = init_scale.measure_starts()
    rows = [
        *checks.theorem_1(copies),
        *checks.theorem_2(shifted),
        *checks.causality(),
        *checks.theorem_3(simulations),
        *checks.figure_2(landscapes),
        *identities,
        *checks.logit_scales(scales),
        *checks.starts(starts),
    ]
    return TheoryReport(
        command=command_line(),
        created=moment(),
        environment=environment(),
        seconds=time.perf_counter() - began,
        checks=rows,
        two_layers=copies,
        one_layer=shifted,
        simulations=simulations,
        landscapes=landscapes,
        logit_scales=scales,
        starts=starts,
    )
