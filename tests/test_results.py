"""The schema of report.json explains itself, and survives numbers that JSON has no word for."""

import pytest

from keyshift.results import Point, Report, RunResult, ShiftWeights, VariantResult


@pytest.mark.parametrize("record", [Point, ShiftWeights, RunResult, VariantResult, Report])
def test_every_field_is_described(record):
    assert [name for name, field in record.model_fields.items() if not field.description] == []


def test_infinite_losses_come_back_from_json():
    run = RunResult(seed=0, status="diverged", train_loss=[(1, float("inf"))])
    assert RunResult.model_validate_json(run.model_dump_json()) == run
