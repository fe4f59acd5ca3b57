"""What ``keyshift scaling`` finds: the schema of ``scaling.json``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from keyshift.results import Record

SCHEMA_VERSION: Literal[1] = 1


class Size(Record):
    """One size of a variant: its runs' final losses."""

    parameters: int = Field(description="N: without token embeddings, output layer and learned positions")
    tokens: int = Field(description="that its runs were trained on, at most")
    losses: list[float] = Field(description="final held-out loss of every finished run, nats per token")
    lost: int = Field(0, description="runs that diverged, failed or have not ended")
    where: str = Field(description="the folder that it was read from, and its labels beside the variant")


class Estimate(Record):
    """A fitted number and its 95% interval, None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None


class Law(Record):
    """L(N) = E + A N^-a, fitted by least squares in the logarithm of the loss."""

    kind: Literal["offset", "power"] = Field(description="power: E = 0, for fewer than 4 sizes")
    floor: Estimate | None = Field(description="E, nats; None for a power law")
    scale: Estimate = Field(description="A")
    exponent: Estimate = Field(description="a")
    error: float = Field(description="root mean square of (predicted - measured) / measured loss")
    band: list[tuple[float, float, float | None, float | None]] = Field(
        description="(N, loss, low, high): the law over the sizes it was fitted to, with 95% intervals"
    )


class Curve(Record):
    """One variant over all sizes."""

    variant: str
    sizes: list[Size] = Field(description="by parameters")
    law: Law | None = None
    remark: str | None = Field(None, description="why there is no law, or what it lacks")


class ScalingReport(Record):
    """The whole of ``scaling.json``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    title: str = Field(description="of the first comparison")
    folders: list[str]
    command: str
    created: str = Field(description="ISO 8601, UTC")
    environment: dict[str, str]
    curves: list[Curve] = Field(description="in the order of the first comparison")
    remarks: list[str] = Field(description="what to know of all curves")
