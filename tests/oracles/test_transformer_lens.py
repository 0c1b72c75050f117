"""TransformerLens itself beside strati: singular values of heads and compositions; run by ``make oracles-test``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strati

pytestmark = pytest.mark.oracle
WIDTH, HEADS, BLOCKS = 768, 12, 2  # the shapes of GPT-2


@pytest.fixture(scope="module")
def circuits() -> dict[str, Any]:
    """A GPT-2 of two blocks with random weights, and its circuits as TransformerLens' factored matrices."""
    factored = pytest.importorskip("transformer_lens.FactoredMatrix").FactoredMatrix
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_head=HEADS, n_layer=BLOCKS, vocab_size=100, n_positions=64
    )
    model = transformers.GPT2LMHeadModel(config).eval()

    def split(weight: Any) -> Any:  # (d_model, heads * d_head) to (heads, d_model, d_head)
        return weight.detach().double().reshape(WIDTH, HEADS, -1).permute(1, 0, 2)

    blocks = [block.attn for block in model.transformer.h]
    query, key, value = (
        torch.stack([split(attention.c_attn.weight.chunk(3, dim=1)[part]) for attention in blocks])
        for part in range(3)
    )
    output = torch.stack([a.c_proj.weight.detach().double().reshape(HEADS, -1, WIDTH) for a in blocks])
    scan = strati.scan(model, heads=True, composition=True, eigenvalues=True, layers="h.*")
    return {"scan": scan, "QK": factored(query, key.transpose(-1, -2)), "OV": factored(value, output)}


@pytest.mark.parametrize("product", ["QK", "OV"])
def test_singular_values_of_every_head(circuits: dict[str, Any], product: str) -> None:
    theirs = circuits[product].S
    rows = {row["name"]: row for row in circuits["scan"].to_dict()["layers"]}
    for block in range(BLOCKS):
        for head in range(HEADS):
            row = rows[f"h.{block}.attn[{head}].{product}"]
            exact = theirs[block, head].numpy()
            np.testing.assert_allclose(np.sqrt(row["eigenvalues"][::-1]), exact, rtol=1e-5)
            assert row["frobenius_norm"] == pytest.approx(float(np.linalg.norm(exact)), rel=1e-5)


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_compositions_of_every_pair(circuits: dict[str, Any], kind: str) -> None:
    composition_scores = pytest.importorskip("transformer_lens.utilities.matrix").composition_scores
    right = {"Q": circuits["QK"], "K": circuits["QK"].T, "V": circuits["OV"]}[kind]
    theirs = composition_scores(circuits["OV"], right)
    pairs = [pair for pair in circuits["scan"].composition if pair.kind == kind]
    assert len(pairs) == HEADS * HEADS
    for pair in pairs:
        source, target = (
            int(name[name.index("[") + 1 : name.index("]")]) for name in (pair.source, pair.target)
        )
        assert pair.score == pytest.approx(float(theirs[0, source, 1, target]), rel=1e-5)
