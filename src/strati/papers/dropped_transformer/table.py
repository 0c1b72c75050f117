"""``strati reproduce dropped-transformer``: every network that can be had here, dropped and put back from its weights.

Each network is solved with a prior measured on the other networks only. Rows give pieces, pairs and order;
then how likeness
falls with the distance of two blocks, role by role, for trained and for freshly initialised networks.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.papers.dropped_transformer.training import (
    FOLLOWED,
    STEPS_KEPT,
    TRAINEES,
    initial,
    sample,
    trained,
)
from strati.papers.registry import Reproduction, Row
from strati.reassembly.config import ReassembleConfig
from strati.reassembly.transformer import calibration
from strati.reassembly.transformer.arrange import Similarity
from strati.reassembly.transformer.drop import Dropped, drop
from strati.reassembly.transformer.layout import stacks, unit_kinds
from strati.reassembly.transformer.scoring import score
from strati.reassembly.transformer.solve import solve_transformer
from strati.reassembly.transformer.stream import features, similarities
from strati.zoo.fetch import path as zoo_path

if TYPE_CHECKING:
    from strati.types import Tick

_ZOO = ("smollm2", "stories15m", "minilm", "minilm-tuned", "whisper")


def dropped_transformer(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The table and the likeness by distance; ``quick``: networks of the zoo that are small, nothing trained."""
    models: dict[str, Any] = {name: zoo_path(name) for name in (_ZOO[1:4] if quick else _ZOO)}
    if not quick:
        for trainee in TRAINEES:
            models[trainee.name] = trained(folder / "networks", trainee, tick=tick)
    dropped = {name: drop(model, seed=seed) for name, model in models.items()}
    known = dict(calibration.measured())
    if not quick:
        known = {name: calibration.measure(_pieces(one), one.answer) for name, one in dropped.items()}
        text = json.dumps({name: calibration.to_json(one) for name, one in known.items()}, sort_keys=True)
        (folder / "measured.json").write_text(text)
    rows = []
    for name, one in dropped.items():
        rows.append(_solved(name, one, known, seed))
        tick(name)
    for name, one in dropped.items():
        rows.append(_falling(f"likeness by distance: {name}", one))
    fresh = drop(initial(FOLLOWED), seed=seed)
    rows.append(_falling(f"likeness by distance: {FOLLOWED.name}, before training", fresh))
    if not quick:
        home = folder / "networks" / FOLLOWED.name
        steps = [step for step in STEPS_KEPT if (home / f"step-{step}").is_dir()]
        for step in steps:
            rows.append(
                _solved(
                    f"{FOLLOWED.name} at step {step}", drop(home / f"step-{step}", seed=seed), known, seed
                )
            )
    title = "transformers dropped into unlabelled pieces, put back from the weights alone"
    return Reproduction("dropped-transformer", title, tuple(rows))


def _solved(name: str, dropped: Dropped, known: dict[str, calibration.Measured], seed: int) -> Row:
    family = name.split("-")[0] if name.startswith("minilm") else name.split(" at step")[0]
    prior = calibration.prior_of(one for other, one in known.items() if not other.startswith(family))
    began = time.perf_counter()
    pieces = _pieces(dropped)
    found = solve_transformer(pieces, None, None, ReassembleConfig(seed=seed), prior=prior)
    taken = time.perf_counter() - began
    right = score(found.blocks, found.vectors, dropped.answer, pieces.arrays)
    ours = f"{right.matrices} of {right.of_matrices} matrices, pairs {right.pairs}, tau {right.tau:.2f}"
    note = (
        f"{dropped.count} pieces; direction {'right' if right.forward else 'WRONG'}; vectors {right.vectors} of "
        f"{right.of_vectors}; {len(found.uncertain)} pieces uncertain; {taken:.1f} s"
    )
    if pieces.config.get("model_type") in ("llama", "gpt2") and int(pieces.config.get("vocab_size", 0)) < 100:
        tokens = sample(FOLLOWED, 4)
        better = solve_transformer(pieces, tokens, None, ReassembleConfig(seed=seed, seconds=60), prior=prior)
        again = score(better.blocks, better.vectors, dropped.answer, pieces.arrays)
        note += (
            f"; with 256 tokens {again.matrices} matrices and {again.vectors} vectors, loss {better.loss:.3f}"
        )
    return Row(name, None, ours, note)


def _falling(what: str, dropped: Dropped) -> Row:
    """Mean likeness of two pieces of one role that are one, two, three and more blocks apart."""
    pieces = _pieces(dropped)
    numbers = {
        s.role: [b[s.role] for b in dropped.answer["blocks"]] for s in pieces.blueprint.block if s.matrix
    }
    flat = {role: features(role, stack) for role, stack in stacks(pieces, numbers).items()}
    given = Similarity(unit_kinds(pieces.blueprint), similarities(flat), pieces.blueprint.blocks)
    parts = []
    for role in flat:
        table = given.between[role, role]
        near = [f"{np.diagonal(table, k).mean():+.2f}" for k in range(1, min(4, len(table)))]
        parts.append(f"{role} {' '.join(near)}")
    return Row(what, None, "; ".join(parts), "1, 2, 3 blocks apart")


def _pieces(dropped: Dropped) -> Any:
    assert dropped.pieces is not None  # dropped in memory
    return dropped.pieces
