"""Unused token rows: found, named, and no reason to call a head broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import strati
from strati.spectra.tokens import _is_noise, unused_rows

UNUSED = [0, 5, 6, 7, 13, 30, 31, 32, 62, 64, 66, 94, 96]
"""``<unk>`` and the characters that do not occur in Shakespeare: their embedding is the initial one, shrunk."""


def head(rows: int, columns: int, copies: int, seed: int = 0, jitter: float = 1e-4) -> NDArray[np.float64]:
    """A head with signal and noise, whose last rows are one vector."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rows, columns)) + rng.normal(size=(rows, 3)) @ rng.normal(size=(3, columns))
    matrix[rows - copies :] = 2 * rng.normal(size=columns)
    matrix[rows - copies :] += jitter * rng.normal(size=(copies, columns))
    return matrix


def states(state_dict: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    rows = strati.scan(state_dict).to_dict()["layers"]
    return {row["name"]: (row["state"], "unused-rows" in codes(row)) for row in rows}


def codes(row: dict[str, Any]) -> set[str]:
    return {flag["code"] for flag in row["warnings"]}


def test_the_embedded_transformer_is_healthy_and_its_unused_characters_are_listed() -> None:
    path = strati.embedded.path("shakespeare")
    scan = strati.scan(path, layers=["lm_head", "*embed_tokens"], tokens=True)
    rows = {row["name"]: row for row in scan.to_dict()["layers"]}
    assert {row["state"] for row in rows.values()} == {"learned"}
    assert "unused-rows" in codes(rows["lm_head.weight"])
    fields = scan.to_dict()["tokens"]
    texts = {
        number: text
        for text, number in json.loads((path / "tokenizer.json").read_text())["model"]["vocab"].items()
    }
    for layer in rows:
        assert [token["id"] for token in fields if token["layer"] == layer] == UNUSED
    assert all(token["token"] == texts[token["id"]] for token in fields)
    # The rows of the embedding are the initial ones up to their length: the list is right, not only plausible.
    first, last = (
        strati.open(strati.embedded.path(name)).read("model.embed_tokens.weight").astype(float)
        for name in ("shakespeare-init", "shakespeare")
    )
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(last, axis=1)
    cosines = np.sum(first * last, axis=1) / lengths
    assert np.flatnonzero(cosines > 0.99).tolist() == UNUSED


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns", "copies"), [(97, 96, 13), (130, 128, 30), (280, 256, 60), (96, 128, 20)]
)
def test_a_head_with_unused_rows_is_not_broken(dtype: type, rows: int, columns: int, copies: int) -> None:
    rng = np.random.default_rng(1)
    embedding = rng.normal(size=(rows, columns)) + 3 * rng.normal(size=(rows, 1))
    matrix = head(rows, columns, copies).astype(dtype)
    state, noted = states({"model.embed_tokens.weight": embedding.astype(dtype), "lm_head.weight": matrix})[
        "lm_head.weight"
    ]
    assert state == "learned" and noted


def test_a_head_that_lacks_rank_for_another_reason_stays_broken() -> None:
    rng = np.random.default_rng(2)
    embedding = rng.normal(size=(97, 96)) + 3 * rng.normal(size=(97, 1))
    low_rank = rng.normal(size=(97, 40)) @ rng.normal(size=(40, 96))
    both = low_rank.copy()
    both[80:] = both[80]
    classifier = head(60, 96, 3)  # no embedding of as many rows: its rows are classes, not tokens
    classifier[57:] = 0
    for matrix in (low_rank, both):
        assert states({"embed_tokens.weight": embedding, "lm_head.weight": matrix})["lm_head.weight"] == (
            "broken",
            False,
        )
    assert states({"embed_tokens.weight": embedding, "lm_head.weight": classifier})["lm_head.weight"] == (
        "broken",
        False,
    )


def test_padded_and_tied_vocabularies_of_gpt2() -> None:
    rng = np.random.default_rng(3)
    used = rng.normal(size=(400, 64)) + rng.normal(size=(400, 2)) @ rng.normal(size=(2, 64))
    padded = np.concatenate([used, np.zeros((48, 64))]).astype(np.float32)
    block = {"transformer.h.0.mlp.c_fc.weight": rng.normal(size=(64, 256)).astype(np.float32)}
    untied = {"transformer.wte.weight": padded, "lm_head.weight": padded[::1].copy() * 2} | block
    states_by_name = states(untied)
    assert states_by_name["lm_head.weight"] == states_by_name["transformer.wte.weight"] == ("learned", True)
    assert states({"transformer.wte.weight": padded} | block)["transformer.wte.weight"] == ("learned", True)
    listed = strati.scan(untied, tokens=True).to_dict()["tokens"]
    assert [token["id"] for token in listed] == 2 * list(range(400, 448))
    assert {token["token"] for token in listed} == {None}


def test_unused_rows_are_missed_at_the_level_and_networks_without_any_have_none() -> None:
    rng = np.random.default_rng(4)
    missing, listed = 0, 0
    for _ in range(100):
        matrix = rng.normal(size=(150, 48)) * np.exp(0.3 * rng.normal(size=(150, 1)))
        listed += len(unused_rows(matrix))
        matrix[140:] = 0.1 * rng.normal(size=(10, 48))
        groups = unused_rows(matrix, level=0.1)
        missing += [group.rows for group in groups] != [tuple(range(140, 150))]
    assert listed == 0
    assert missing <= 18  # 10 expected at most; 18 or more have a chance of 1 %


def test_an_untrained_network_has_no_under_trained_tokens() -> None:
    """All rows are alike there, so none stands apart."""
    assert (
        strati.scan(
            strati.embedded.path("shakespeare-init"), layers=["lm_head", "*embed*"], tokens=True
        ).tokens
        == ()
    )


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    folder = strati.embedded.path("shakespeare")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(strati.StratiError, match=r"tokenizer\.json"):
        strati.scan(tmp_path, layers="lm_head", tokens=True)


@pytest.mark.parametrize("shape", [(8, 40), (40, 40), (90, 20)])
@pytest.mark.parametrize("planted", [0.0, 3.0])
def test_residuals_of_any_shape_are_noise_unless_they_share_a_direction(
    shape: tuple[int, int], planted: float
) -> None:
    rng = np.random.default_rng(sum(shape))
    rows = rng.normal(size=shape) + planted * np.outer(rng.normal(size=shape[0]), rng.normal(size=shape[1]))
    assert _is_noise(rows - rows.mean(axis=0), shape[1]) == (planted == 0)
