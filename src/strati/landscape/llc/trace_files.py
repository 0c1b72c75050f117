"""Traces in a netCDF file that ArviZ reads, so that estimates can be made again later."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from strati.core.errors import BadInputError, require
from strati.core.results import jsonable
from strati.landscape.llc.geometry import Surroundings
from strati.landscape.llc.numerical_rank import NumericalRank
from strati.landscape.llc.traces import Traces

_ARRAYS = ("nbeta", "excess", "spread", "controls", "acceptance")


def save_traces(traces: Traces, path: str | Path) -> None:
    """Write traces as netCDF: ``posterior`` as ArviZ expects it, all arrays of the samplers in ``constant_data``.

    Raises:
        MissingExtraError: arviz is not installed.

    Examples:
        >>> import tempfile, torch
        >>> from strati import learning_coefficient
        >>> result = learning_coefficient(lambda w: (w**2).sum(), torch.zeros(1), chains=4, draws=50)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_traces(result.traces, Path(folder) / "draws.nc")
        ...     again = load_traces(Path(folder) / "draws.nc")
        >>> bool((again.excess == result.traces.excess).all())
        True
    """
    arviz = require("arviz", "arviz", "saving draws")
    arrays = {name: getattr(traces, name) for name in _ARRAYS}
    names = [field.name for field in dataclasses.fields(traces) if field.name not in (*_ARRAYS, "positions")]
    scalars = jsonable({name: getattr(traces, name) for name in names})
    stored = arviz.from_dict(
        posterior=traces.posterior(), constant_data=arrays, attrs={"strati": json.dumps(scalars)}
    )
    stored.to_netcdf(str(path), engine="h5netcdf")


def load_traces(path: str | Path) -> Traces:
    """Read what :func:`save_traces` wrote; :func:`~strati.landscape.llc.estimate.estimate` takes it.

    Raises:
        BadInputError: The file does not hold traces.
        MissingExtraError: arviz is not installed.
    """
    arviz = require("arviz", "arviz", "reading draws")
    try:
        stored = arviz.from_netcdf(str(path), engine="h5netcdf")
        scalars: dict[str, Any] = json.loads(stored.attrs["strati"])
        arrays: dict[str, Any] = {name: np.asarray(stored.constant_data[name]) for name in _ARRAYS}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BadInputError(
            path, "holds no draws; write them with llc(..., keep=True).save_draws(PATH)"
        ) from error
    around = scalars.pop("around")
    if around is not None:
        rank = None if around["rank"] is None else NumericalRank(*around["rank"])
        places = {name: np.array(around.pop(name), dtype=float) for name in ("curvature", "displacement")}
        around = Surroundings(**{**around, "rank": rank, **places})
    names = [name for name in stored.posterior.data_vars if name not in ("llc", "loss", "distance")]
    positions = {name: np.asarray(stored.posterior[name]) for name in names}
    return Traces(**arrays, **scalars, around=around, positions=positions or None)
