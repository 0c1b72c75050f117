"""``strati reproduce dropped-transformer``: every network that can be had here, dropped and put back from its weights.

Each network is solved with a prior measured on the other networks only: pieces, pairs, order and direction without
data, and how many of the pieces it calls sure are wrong; then with 256 tokens, by the loss of the next one where it
predicts that, and by what the network answered to them (``with_data``). Then the harder settings, and why it works
(``diagnostics``). What was measured is kept in the folder, so that an interrupted run goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.core.files import write_atomic
from strati.reassembly.reassemble import ReassembleConfig
from strati.reassembly.transformer.shuffle import ShuffledCheckpoint, shuffle_transformer
from strati.reassembly.transformer.solve import solve_transformer
from strati_reproductions.dropped_transformer import diagnostics
from strati_reproductions.dropped_transformer.measure import (
    MeasuredSignals,
    from_json,
    measure,
    measured,
    prior_of,
    prior_to_json,
    to_json,
)
from strati_reproductions.dropped_transformer.scoring import score
from strati_reproductions.dropped_transformer.training import (
    FOLLOWED,
    STEPS_KEPT,
    TRAINEES,
    initial,
    trained,
)
from strati_reproductions.dropped_transformer.whisper import whisper_encoder
from strati_reproductions.dropped_transformer.with_data import with_data
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.zoo.fetch import path as zoo_path

if TYPE_CHECKING:
    from strati.core.results import Tick

_ZOO = ("smollm2", "stories15m", "minilm", "minilm-tuned", "whisper")
_HARDER = ("stories15m", "minilm", FOLLOWED.name)
_SETTINGS: dict[str, dict[str, bool]] = {
    "permuted": {"permute": True},
    "rescaled": {"rescale": True},
    "permuted and rescaled": {"permute": True, "rescale": True},
}
"""Networks on which the harder settings are measured, and these."""


@dataclass(frozen=True)
class _Kept:
    """Results by name in a file each."""

    folder: Path

    def get(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured before, or what is measured now."""
        file = self.folder / f"{name.replace('/', '-').replace(' ', '-')}.json"
        if file.is_file():
            found: dict[str, Any] = json.loads(file.read_text("utf-8"))
            return found
        self.folder.mkdir(parents=True, exist_ok=True)
        made = make()
        write_atomic(file, json.dumps(made) + "\n")
        return made


def dropped_transformer(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The table, the harder settings and the reasons; ``quick``: small networks of the zoo, nothing trained."""
    models: dict[str, Any] = {name: zoo_path(name) for name in (_ZOO[1:4] if quick else _ZOO)}
    if not quick:
        for trainee in TRAINEES:
            models[trainee.name] = trained(folder / "networks", trainee, tick=tick)
    return _reproduced(models, quick=quick, seed=seed, folder=folder, tick=tick)


def at_hand(*, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The same of the zoo and of those networks below ``folder`` that are trained already."""
    models: dict[str, Any] = {name: zoo_path(name) for name in _ZOO}
    homes = {trainee.name: folder / "networks" / trainee.name for trainee in TRAINEES}
    models |= {name: home for name, home in homes.items() if home.is_dir()}
    return _reproduced(models, quick=False, seed=seed, folder=folder, tick=tick)


def _reproduced(models: dict[str, Any], *, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    kept = _Kept(folder / f"rows-seed{seed}")
    known = dict(measured()) if quick else _measured(models, kept, folder, seed)
    rows: list[Row] = []
    wrong: list[tuple[str, int]] = []
    sure = sure_wrong = 0
    for name, model in models.items():
        found = kept.get(name, partial(_measure_one, name, model, {}, known, seed, not quick))
        rows.append(Row(name, None, found["ours"], found["note"]))
        wrong += [(role, apart) for role, apart in found["misplaced"]]
        sure, sure_wrong = sure + found["sure"], sure_wrong + found["sure_wrong"]
        tick(name)
    share = 100 * (1 - sure_wrong / max(sure, 1))
    note = f"{sure_wrong} wrong of {sure}; each network by a prior of the others"
    rows.append(Row("pieces called sure that are in place, %", None, round(share, 2), note))
    rows.append(diagnostics.confused(wrong))
    for name in _HARDER:
        for setting, options in _SETTINGS.items() if name in models else ():
            one = partial(_measure_one, name, models[name], options, known, seed, False)
            found = kept.get(f"{name}, {setting}", one)
            rows.append(Row(f"{name}, {setting}", None, found["ours"], found["note"]))
            tick(setting)
    more, figures = _reasons(models, known, kept, folder, seed, quick)
    title = "transformers dropped into unlabelled pieces, put back from the weights alone"
    return Reproduction(
        "dropped-transformer", title, tuple(rows + more), figures, captions=diagnostics.CAPTIONS
    )


def _measured(models: dict[str, Any], kept: _Kept, folder: Path, seed: int) -> dict[str, MeasuredSignals]:
    """What each signal is worth on each network, written as ``measured.json`` and the product's ``prior.json`` are."""
    plain = {}
    for name, model in models.items():

        def make(model: Any = model) -> dict[str, Any]:
            dropped = _shuffled(model, seed=seed)
            return to_json(measure(_pieces(dropped), dropped.answer))

        plain[name] = kept.get(f"measured {name}", make)
    write_atomic(folder / "measured.json", json.dumps(plain, sort_keys=True))
    known = {name: from_json(one) for name, one in plain.items()}
    write_atomic(folder / "prior.json", json.dumps(prior_to_json(prior_of(known.values()))))
    return known


def _measure_one(
    name: str,
    model: Any,
    options: dict[str, bool],
    known: dict[str, MeasuredSignals],
    seed: int,
    data: bool,
) -> dict[str, Any]:
    return _solved(name, _shuffled(model, seed=seed, **options), known, seed, data=data)


def _solved(
    name: str,
    dropped: ShuffledCheckpoint,
    known: dict[str, MeasuredSignals],
    seed: int,
    *,
    data: bool = True,
) -> dict[str, Any]:
    family = name.split("-")[0] if name.startswith("minilm") else name.split(" at step")[0]
    prior = prior_of(one for other, one in known.items() if not other.startswith(family))
    began = time.perf_counter()
    pieces = _pieces(dropped)
    found = solve_transformer(pieces, None, None, ReassembleConfig(seed=seed), prior=prior)
    taken = time.perf_counter() - began
    right = score(
        found.blocks, found.vectors, dropped.answer, pieces.arrays, unfixed=pieces.blueprint.unfixed
    )
    sure, sure_wrong = _sure(found, dropped.answer)
    ours = f"{right.matrices} of {right.of_matrices} matrices, pairs {right.pairs}, tau {right.tau:.2f}"
    note = (
        f"{dropped.count} pieces; direction {'right' if right.forward else 'WRONG'}; vectors {right.vectors} of "
        f"{right.of_vectors}; {len(found.uncertain)} pieces uncertain, {sure_wrong} of {sure} others wrong; "
        f"{taken:.1f} s"
    )
    told = with_data(name, dropped, found, seed) if data else []
    note += "".join(f"; {line}" for line in told)
    return {
        "ours": ours,
        "note": note,
        "misplaced": diagnostics.misplaced(found.blocks, dropped.answer),
        "sure": sure,
        "sure_wrong": sure_wrong,
        "matrices": right.matrices,
        "of_matrices": right.of_matrices,
    }


def _shuffled(model: Any, **options: Any) -> ShuffledCheckpoint:
    """Shuffle a network in memory; OpenAI's file of Whisper has no configuration beside it."""
    if isinstance(model, Path) and model.suffix == ".pt":
        tensors, config = whisper_encoder(model)
        return shuffle_transformer(tensors, network=config, **options)
    return shuffle_transformer(model, **options)


def _sure(found: Any, answer: Any) -> tuple[int, int]:
    """Pieces of blocks that are not called uncertain, and how many of them are not in their place."""
    sure = wrong = 0
    for mine, theirs in ((found.blocks, answer["blocks"]), (found.vectors, answer["vectors"])):
        for one, other in zip(mine, theirs, strict=True):
            for role, number in one.items():
                if number not in found.uncertain:
                    sure += 1
                    wrong += number != other[role]
    return sure, wrong


def _reasons(
    models: dict[str, Any],
    known: dict[str, MeasuredSignals],
    kept: _Kept,
    folder: Path,
    seed: int,
    quick: bool,
) -> tuple[list[Row], tuple[str, ...]]:
    """Likeness by distance and depth, before and over training, and the public puzzle; two figures."""
    rows: list[Row] = []
    curves: dict[str, ShuffledCheckpoint] = {}
    for name, model in models.items():
        dropped = _shuffled(model, seed=seed)
        rows.append(diagnostics.falling(name, dropped))
        if name in _ZOO:
            rows.append(diagnostics.by_depth(name, dropped))
        if name in ("smollm2", "stories15m", "minilm", FOLLOWED.name):
            curves[f"{name}, trained"] = dropped
    fresh = shuffle_transformer(initial(FOLLOWED), seed=seed)
    rows.append(diagnostics.falling(f"{FOLLOWED.name}, before training", fresh))
    curves[f"{FOLLOWED.name}, before training"] = fresh
    steps: list[tuple[int, int, int]] = []
    home = folder / "networks" / FOLLOWED.name
    for step in () if quick else STEPS_KEPT:
        if (home / f"step-{step}").is_dir():
            name = f"{FOLLOWED.name} at step {step}"
            found = kept.get(name, partial(_measure_one, name, home / f"step-{step}", {}, known, seed, False))
            rows.append(Row(name, None, found["ours"], found["note"]))
            steps.append((step, found["matrices"], found["of_matrices"]))
    rows.append(diagnostics.residual_path())
    folder.mkdir(parents=True, exist_ok=True)
    return rows, diagnostics.draw(folder, curves, steps)


def _pieces(dropped: ShuffledCheckpoint) -> Any:
    assert dropped.pieces is not None  # dropped in memory
    return dropped.pieces
