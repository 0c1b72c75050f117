"""Products of attention heads: exact values, invariance, calibrated spikes, compositions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

import strati
from strati.spectra.head_pairs import compare_heads, composition
from strati.spectra.head_paths import rotary_logits
from strati.spectra.heads import count_spikes, equal_runs, head_matrices, product_singular_values

Array = NDArray[np.float64]


def rows(network: Any, **options: Any) -> dict[str, dict[str, Any]]:
    scan = strati.scan(network, heads=True, layers="h.*", **options)
    return {row["name"]: row for row in scan.to_dict()["layers"] if row["kind"].startswith("head.")}


def gpt2(
    tmp_path: Any, *, width: int = 48, heads: int = 4, blocks: int = 2, seed: int = 0
) -> dict[str, Array]:
    """A GPT-2 of random weights, written as a folder; its tensors by name."""
    rng = np.random.default_rng(seed)
    tensors = {"wte.weight": rng.normal(size=(90, width)), "wpe.weight": rng.normal(size=(40, width))}
    for block in range(blocks):
        tensors[f"h.{block}.attn.c_attn.weight"] = rng.normal(size=(width, 3 * width))
        tensors[f"h.{block}.attn.c_proj.weight"] = rng.normal(size=(width, width))
    config = {"model_type": "gpt2", "n_head": heads, "n_embd": width, "n_layer": blocks}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: array.astype(np.float32) for name, array in tensors.items()}, tmp_path / "model.safetensors"
    )
    return {name: array.astype(np.float32).astype(float) for name, array in tensors.items()}


def test_gpt2s_fused_inputs_first_projections_against_the_dense_products(tmp_path: Any) -> None:
    tensors = gpt2(tmp_path)
    by_name = rows(tmp_path, eigenvalues=True)
    assert list(by_name)[:3] == ["h.0.attn[0].QK", "h.0.attn[0].OV", "h.0.attn[1].QK"]
    assert len(by_name) == 2 * 4 * 2
    for block in range(2):
        query, key, value = np.split(tensors[f"h.{block}.attn.c_attn.weight"], 3, axis=1)
        out = tensors[f"h.{block}.attn.c_proj.weight"]
        for head in range(4):
            part = slice(12 * head, 12 * head + 12)
            dense = {"QK": query[:, part] @ key[:, part].T, "OV": value[:, part] @ out[part]}
            for product, matrix in dense.items():
                row = by_name[f"h.{block}.attn[{head}].{product}"]
                exact = np.linalg.svd(matrix, compute_uv=False)[:12]
                np.testing.assert_allclose(np.sqrt(row["eigenvalues"][::-1]), exact, rtol=1e-6)
                assert (
                    row["kind"] == f"head.{product.lower()}" and row["block"] == block and row["head"] == head
                )
                assert (row["rows"], row["cols"], row["width"], row["hard_rank"]) == (48, 48, 12, 12)
                assert row["stable_rank"] == pytest.approx(np.sum(exact**2) / exact[0] ** 2)
                assert row["frobenius_norm"] == pytest.approx(np.linalg.norm(matrix))


def test_grouped_queries_of_the_embedded_transformer_against_the_dense_products() -> None:
    path = strati.embedded.path("shakespeare")
    network = strati.open(path)
    by_name = rows(path, eigenvalues=True)
    assert len(by_name) == 2 * 6 * 5

    def weight(name: str) -> Array:
        return np.asarray(network.read(f"model.layers.2.self_attn.{name}_proj.weight"), dtype=float)

    for head in range(6):
        shared = slice(16 * (head // 2), 16 * (head // 2) + 16)
        part = slice(16 * head, 16 * head + 16)
        scores, moves = weight("q")[part].T @ weight("k")[shared], weight("o")[:, part] @ weight("v")[shared]
        for matrix, product in ((scores, "QK"), (moves, "OV")):
            row = by_name[f"h.2.attn[{head}].{product}"]
            exact = np.linalg.svd(matrix, compute_uv=False)[:16]
            np.testing.assert_allclose(np.sqrt(row["eigenvalues"][::-1]), exact, rtol=1e-9)
        codes = {flag["code"] for flag in by_name[f"h.2.attn[{head}].QK"]["warnings"]}
        assert {"rotary", "shared-heads"} <= codes
        # The path from embedding to head, formed in full: its nonzero eigenvalues give the copying score.
        table, unembed = (
            np.asarray(network.read(name), float) for name in ("model.embed_tokens.weight", "lm_head.weight")
        )
        eigenvalues = np.linalg.eigvals(unembed @ moves @ table.T)
        score = eigenvalues.real.sum() / np.abs(eigenvalues).sum()
        assert by_name[f"h.2.attn[{head}].OV"]["copying"] == pytest.approx(score, abs=1e-4)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), width=st.integers(2, 8))
def test_a_change_of_basis_inside_a_head_changes_nothing(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(2, width, 24))
    basis = np.linalg.qr(rng.normal(size=(width, width)))[0] * rng.uniform(0.2, 5.0, size=width)
    moved = product_singular_values(basis @ left, np.linalg.solve(basis.T, right))
    np.testing.assert_allclose(moved, product_singular_values(left, right), rtol=1e-8)


def test_a_change_of_basis_leaves_every_number_of_a_row(tmp_path: Any) -> None:
    tensors = gpt2(tmp_path, blocks=1)
    rng = np.random.default_rng(5)
    state = {name: array.copy() for name, array in tensors.items()}
    fused, out = state["h.0.attn.c_attn.weight"], state["h.0.attn.c_proj.weight"]
    for head in range(4):
        part = slice(12 * head, 12 * head + 12)
        for first, second in ((slice(0, 48), slice(48, 96)), (slice(96, 144), None)):
            basis = rng.normal(size=(12, 12)) + 4 * np.eye(12)
            fused[:, first][:, part] = fused[:, first][:, part] @ basis
            if second is not None:
                fused[:, second][:, part] = fused[:, second][:, part] @ np.linalg.inv(basis).T
            else:
                out[part] = np.linalg.inv(basis) @ out[part]
    before = rows(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    after = rows(tmp_path)
    names = (
        "stable_rank",
        "spectral_norm",
        "frobenius_norm",
        "copying",
        "copying_pvalue",
        "positional",
        "spikes",
    )
    for name, row in before.items():
        for field in names:
            if row[field] is not None:
                assert after[name][field] == pytest.approx(row[field], rel=1e-4), (name, field)


@pytest.mark.parametrize(("width", "inputs"), [(8, 64), (16, 96), (64, 256)])
def test_false_positive_rate_of_spikes_on_untrained_heads(width: int, inputs: int) -> None:
    """The stated level, for Gaussian and for uniform initial weights; a planted direction is found."""
    rng = np.random.default_rng(width)
    draws, level = 300, 0.05
    spiked = 0
    for draw in range(draws):
        shape = (2, width, inputs)
        left, right = rng.normal(size=shape) if draw % 2 else rng.uniform(-1, 1, size=shape)
        spiked += (
            count_spikes(product_singular_values(left, right), left.shape, right.shape, level=level)[0] > 0
        )
    assert 4 <= spiked <= 28  # 15 expected; outside with a chance of 0.1 %
    left, right = rng.normal(size=(2, width, inputs))
    left[0], right[0] = left[0] * 6, right[0] * 6
    spikes, pvalue = count_spikes(product_singular_values(left, right), left.shape, right.shape, level=level)
    assert 1 <= spikes <= 2 and pvalue < 0.005  # a second one by chance, at the level


def test_equal_singular_values_are_marked(tmp_path: Any) -> None:
    tensors = gpt2(tmp_path, blocks=1)
    left, right = (np.linalg.qr(np.random.default_rng(seed).normal(size=(48, 12)))[0] for seed in (1, 2))
    fused = tensors["h.0.attn.c_attn.weight"]
    fused[:, :12], fused[:, 48:60] = left * np.array([5, 4, 4, 4, 3, 2.5, 2, 1.5, 1, 0.5, 0.2, 0.2]), right
    save_file(tensors, tmp_path / "model.safetensors")
    row = rows(tmp_path)["h.0.attn[0].QK"]
    assert row["ambiguous"] == [[1, 3], [10, 11]] and "ambiguous" in {
        flag["code"] for flag in row["warnings"]
    }
    assert equal_runs(np.array([3.0, 2.0, 1.0])) == ()


def test_a_previous_token_head_is_found(tmp_path: Any) -> None:
    """Positions as a circle: a QK that turns by one step attends to the position before."""
    tensors = gpt2(tmp_path, blocks=1)
    angles = np.outer(np.arange(40), 2 * np.pi * np.arange(1, 7) / 41)
    table = np.zeros((40, 48))
    table[:, 0:12:2], table[:, 1:12:2] = np.cos(angles), np.sin(angles)
    table[:, 12:24] = -table[:, :12]  # rows have mean 0
    turned = np.zeros((40, 48))
    back = angles - 2 * np.pi * np.arange(1, 7) / 41
    turned[:, 0:12:2], turned[:, 1:12:2] = np.cos(back), np.sin(back)
    fused = tensors["h.0.attn.c_attn.weight"]
    query = np.linalg.lstsq(table, turned[:, :12], rcond=None)[0]
    fused[:, :12], fused[:, 48:60] = 30 * query, np.eye(48)[:, :12]
    tensors["wpe.weight"] = table
    save_file(tensors, tmp_path / "model.safetensors")
    by_name = rows(tmp_path)
    assert (
        by_name["h.0.attn[0].QK"]["positional_offset"] == 1 and by_name["h.0.attn[0].QK"]["positional"] > 0.9
    )
    assert by_name["h.0.attn[1].QK"]["positional"] < 0.5


def turned(vectors: Array, base: float, *, neighbours: bool = False) -> Array:
    """Row p turned by p steps, pair by pair with 2 x 2 matrices."""
    width = vectors.shape[1]
    half = width // 2
    moved = vectors.copy()
    for position in range(len(vectors)):
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if neighbours else (pair, pair + half)
            angle = position * base ** (-2 * pair / width)
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            moved[position, [first, second]] = turn @ vectors[position, [first, second]]
    return moved


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), base=st.sampled_from([10.0, 10_000.0]), neighbours=st.booleans())
def test_rotary_logits_against_rotations_pair_by_pair(seed: int, base: float, neighbours: bool) -> None:
    query, key = np.random.default_rng(seed).normal(size=(2, 8))
    config = {"rope_parameters": {"rope_theta": base}, "model_type": "gptj" if neighbours else "llama"}
    queries, keys = (turned(np.tile(x, (12, 1)), base, neighbours=neighbours) for x in (query, key))
    logits = queries @ keys.T / np.sqrt(8)
    for distance, logit in enumerate(rotary_logits(query, key, 12, config)):
        np.testing.assert_allclose(np.diagonal(logits, -distance), logit, atol=1e-10)
    # Entries that do not turn add the same at every distance.
    longer = [np.r_[x, 1.0, 2.0, 0.0, 0.0] for x in (query, key)]
    partial = rotary_logits(*longer, 12, config | {"rotary_dim": 8})
    np.testing.assert_allclose(partial * np.sqrt(12), logits[-1, ::-1] * np.sqrt(8) + 5, atol=1e-10)


def rotary(tmp_path: Any, *, width: int = 32, heads: int = 4) -> dict[str, Array]:
    """A transformer of random weights with rotary positions, layer norms and biases of queries and keys."""
    rng = np.random.default_rng(3)
    tensors = {"embed_tokens.weight": rng.normal(size=(60, width)) + 0.3 * rng.normal(size=width)}
    for block in range(2):
        for name in "qkvo":
            tensors[f"layers.{block}.{name}_proj.weight"] = rng.normal(size=(width, width)) / width**0.5
        for name in ("q_proj.bias", "k_proj.bias", "norm.bias"):
            tensors[f"layers.{block}.{name}"] = rng.normal(size=width)
        tensors[f"layers.{block}.norm.weight"] = rng.uniform(0.5, 2.0, size=width)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads, "rope_theta": 10.0}))
    return tensors


def test_rotary_shares_are_those_of_the_logits_averaged_over_all_pairs_of_tokens(tmp_path: Any) -> None:
    tensors = rotary(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    by_name = rows(tmp_path)
    table = tensors["embed_tokens.weight"]
    table = (table - table.mean(1, keepdims=True)) / table.std(1, keepdims=True)
    for block in range(2):
        norm, shift = (tensors[f"layers.{block}.norm.{part}"] for part in ("weight", "bias"))
        queries, keys = (
            (table * norm + shift) @ tensors[f"layers.{block}.{x}_proj.weight"].T
            + tensors[f"layers.{block}.{x}_proj.bias"]
            for x in "qk"
        )
        for head in range(4):
            part = slice(8 * head, 8 * head + 8)
            logits = np.empty(256)
            for distance in range(256):  # the query of the last position, the key of one before it
                angles = distance * 10.0 ** (-np.arange(4) / 4)
                near, far = queries[:, part][:, :4], queries[:, part][:, 4:]
                moved = np.c_[
                    near * np.cos(angles) - far * np.sin(angles), near * np.sin(angles) + far * np.cos(angles)
                ]
                logits[distance] = (moved @ keys[:, part].T).mean() / np.sqrt(8)
            logits[0] = np.sum(queries[:, part] * keys[:, part], axis=1).mean() / np.sqrt(8)
            shares = np.exp(logits - logits.max())
            shares /= shares.sum()
            row = by_name[f"h.{block}.attn[{head}].QK"]
            assert row["positional_offset"] == int(np.argmax(shares[:8]))
            assert row["positional"] == pytest.approx(shares[:8].max(), rel=1e-6)


def test_a_previous_token_head_is_found_under_rotary_positions(tmp_path: Any) -> None:
    """The mean query is the mean key turned by one step, so that both agree best one position before."""
    tensors = rotary(tmp_path)
    before = np.ones((2, 8))
    tensors["layers.0.q_proj.bias"][16:24] = 8 * turned(before, 10.0)[0]
    tensors["layers.0.k_proj.bias"][16:24] = 8 * turned(before, 10.0)[1]
    save_file(tensors, tmp_path / "model.safetensors")
    shares = {
        name: row["positional"] if row["positional_offset"] == 1 else 0.0
        for name, row in rows(tmp_path).items()
        if row["kind"] == "head.qk"
    }
    assert max(shares, key=lambda name: shares[name]) == "h.0.attn[2].QK"
    assert shares["h.0.attn[2].QK"] > 0.5


def test_composition_scores_and_their_p_values(tmp_path: Any) -> None:
    tensors = gpt2(tmp_path, seed=3)
    fused, out = tensors["h.1.attn.c_attn.weight"], tensors["h.0.attn.c_proj.weight"]
    fused[:, 60:72] = out[:12].T  # the keys of head 1 of block 1 read what head 0 of block 0 writes
    save_file(tensors, tmp_path / "model.safetensors")
    pairs = composition(head_matrices(strati.open(tmp_path)))
    assert len(pairs) == 3 * 4 * 4
    first = min(pairs, key=lambda pair: pair.pvalue)
    assert (first.kind, first.source, first.target) == ("K", "h.0.attn[0].OV", "h.1.attn[1].QK")
    assert first.pvalue < 1e-6
    value = tensors["h.0.attn.c_attn.weight"][:, 96:108]
    moves = (value @ out[:12]).T
    scores = fused[:, 12:24] @ fused[:, 60:72].T
    exact = np.linalg.norm(scores @ moves) / np.linalg.norm(scores) / np.linalg.norm(moves)
    assert first.score == pytest.approx(exact, rel=1e-5)
    # The p-value against rotations that were drawn.
    rng, other = np.random.default_rng(0), next(p for p in pairs if 0.05 < p.pvalue < 0.3 and p.kind == "K")
    head = int(other.target[9])
    scores = fused[:, 12 * head : 12 * head + 12] @ fused[:, 48 + 12 * head : 60 + 12 * head].T
    source = int(other.source[9])
    part = slice(12 * source, 12 * source + 12)
    moves = (tensors["h.0.attn.c_attn.weight"][:, 96:][:, part] @ out[part]).T
    drawn = []
    for _ in range(400):
        rotation = np.linalg.qr(rng.normal(size=(48, 48)))[0]
        drawn.append(
            np.linalg.norm(scores @ rotation @ moves) / np.linalg.norm(scores) / np.linalg.norm(moves)
        )
    share = float(np.mean(np.array(drawn) >= other.score))
    assert abs(share - other.pvalue) < 0.07  # the chi-squared law is that of many dimensions
    assert np.sqrt(np.mean(np.square(drawn))) == pytest.approx(other.expected, rel=0.02)


def test_compositions_of_an_untrained_network_are_at_the_level() -> None:
    scan = strati.scan(strati.embedded.path("shakespeare-init"), composition=True, layers="h.*")
    pvalues = np.array([pair.pvalue for pair in scan.composition or ()])
    assert pvalues.size == 1080 and 0.01 < np.mean(pvalues < 0.05) < 0.08
    assert pvalues.min() * pvalues.size > 0.01


def test_networks_without_heads_are_refused() -> None:
    with pytest.raises(strati.StratiError, match="heads"):
        strati.scan({"fc1.weight": np.eye(8), "fc2.weight": np.eye(8)}, heads=True)
    weights = {f"h.0.attn.{name}_proj.weight": np.eye(8) for name in "qkvo"}
    with pytest.raises(strati.StratiError, match=r"config\.json"):
        strati.scan(weights, heads=True)


def test_a_head_of_zeros_is_broken_and_said_to_do_nothing(tmp_path: Any) -> None:
    tensors = gpt2(tmp_path, blocks=1)
    tensors["h.0.attn.c_proj.weight"][:12] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    row = rows(tmp_path)["h.0.attn[0].OV"]
    assert row["state"] == "broken" and "constant" in {flag["code"] for flag in row["warnings"]}


@pytest.mark.slow
def test_other_architectures_against_the_dense_products() -> None:
    """Fused head by head (GPT-NeoX), split (BERT), and two towers with cross-attention (T5), which get other names."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    neox = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(intermediate_size=128, **sizes))
    attention = neox.gpt_neox.layers[1].attention
    query, key, value = attention.query_key_value.weight.detach().numpy().reshape(4, 3, 16, 64)[2]
    out = attention.dense.weight.detach().numpy()[:, 32:48]
    by_name = rows(neox)
    assert by_name["h.1.attn[2].QK"]["spectral_norm"] == pytest.approx(
        np.linalg.norm(query.T @ key, 2), rel=1e-5
    )
    assert by_name["h.1.attn[2].OV"]["spectral_norm"] == pytest.approx(
        np.linalg.norm(out @ value, 2), rel=1e-5
    )
    bert = transformers.BertModel(transformers.BertConfig(intermediate_size=128, **sizes))
    inside = bert.encoder.layer[0].attention
    query, key = (layer.weight.detach().numpy()[16:32] for layer in (inside.self.query, inside.self.key))
    expected = np.linalg.norm(query.T @ key, 2)
    assert rows(bert)["h.0.attn[1].QK"]["spectral_norm"] == pytest.approx(expected, rel=1e-5)
    settings_t5 = transformers.T5Config(
        d_model=64, num_heads=4, d_kv=16, num_layers=2, vocab_size=100, d_ff=128
    )
    t5 = strati.scan(transformers.T5ForConditionalGeneration(settings_t5), heads=True, composition=True)
    names = t5.frame()["name"]
    assert "decoder.block.1.cross_attn[3].OV" in set(names) and names.is_unique
    pairs = t5.composition or ()
    assert {pair.kind for pair in pairs if "cross" in pair.target} == {"Q"}
    assert all(pair.source.split(".")[0] == pair.target.split(".")[0] for pair in pairs)


def rewritten(
    tensors: dict[str, Array], seed: int, *, heads: int = 4, order: bool = True
) -> tuple[dict[str, Array], list[int]]:
    """The same network with other bases inside its heads and the heads of block 0 in another order."""
    rng = np.random.default_rng(seed)
    fused, out = tensors["h.0.attn.c_attn.weight"], tensors["h.0.attn.c_proj.weight"]
    width = len(out) // heads
    query, key, value = (part.T.reshape(heads, width, -1).copy() for part in np.split(fused, 3, axis=1))
    output = out.reshape(heads, width, -1).copy()
    for head in range(heads):
        for left, right in ((query, key), (output, value)):
            basis = rng.normal(size=(width, width)) + 4 * np.eye(width)
            left[head], right[head] = basis @ left[head], np.linalg.solve(basis.T, right[head])
    places = rng.permutation(heads) if order else np.arange(heads)
    parts = [part[places].reshape(heads * width, -1).T for part in (query, key, value)]
    state = tensors | {
        "h.0.attn.c_attn.weight": np.hstack(parts),
        "h.0.attn.c_proj.weight": output[places].reshape(out.shape),
    }
    return {name: np.ascontiguousarray(array, np.float32) for name, array in state.items()}, places.tolist()


def written(folder: Any, tensors: dict[str, Array], like: Any) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((like / "config.json").read_text())
    save_file(
        {name: np.ascontiguousarray(v, np.float32) for name, v in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize("seed", range(3))
def test_comparing_heads_sees_neither_their_basis_nor_their_order(tmp_path: Any, seed: int) -> None:
    tensors = gpt2(tmp_path, seed=seed)
    state, places = rewritten(tensors, seed)
    other = written(tmp_path / "other", state, tmp_path)
    pairs = compare_heads(strati.open(tmp_path), strati.open(other))
    assert len(pairs) == 2 * 2 * 4
    for pair in pairs:
        assert pair.relative_change < 3 * pair.rounding < 1e-4
        assert pair.similarity == pytest.approx(1, abs=1e-8) and pair.pvalue < 1e-6
        block, head = int(pair.name[2]), int(pair.name[9])
        assert int(pair.partner[9]) == (places.index(head) if block == 0 else head)
        assert (pair.factor_change > 1) == (block == 0)


def test_changes_of_heads_against_the_dense_products(tmp_path: Any) -> None:
    tensors = gpt2(tmp_path)
    changed = {name: array.copy() for name, array in tensors.items()}
    rng = np.random.default_rng(7)
    update = rng.normal(size=(48, 1)) @ rng.normal(size=(1, 12))
    changed["h.1.attn.c_attn.weight"][:, 12:24] += update  # the queries of head 1 of block 1
    other = written(tmp_path / "other", rewritten(changed, 3)[0], tmp_path)
    pairs = {pair.name: pair for pair in compare_heads(strati.open(tmp_path), strati.open(other))}
    query, key, _ = np.split(tensors["h.1.attn.c_attn.weight"], 3, axis=1)
    before, difference = query[:, 12:24] @ key[:, 12:24].T, update @ key[:, 12:24].T
    pair = pairs["h.1.attn[1].QK"]
    assert pair.relative_change == pytest.approx(
        np.linalg.norm(difference) / np.linalg.norm(before), rel=1e-5
    )
    assert pair.update_stable_rank == pytest.approx(1, abs=1e-4)
    cosine = (
        np.sum((before + difference) * before) / np.linalg.norm(before + difference) / np.linalg.norm(before)
    )
    assert pair.similarity == pytest.approx(cosine, abs=1e-6)
    beyond = {name for name, pair in pairs.items() if pair.relative_change > 3 * pair.rounding}
    assert beyond == {"h.1.attn[1].QK"}


def test_similarities_of_independent_heads_are_at_the_level(tmp_path: Any) -> None:
    """360 pairs of products of untrained heads: 5 % have a p-value below 0.05, before the choice of a partner."""
    gpt2(tmp_path, width=60, heads=5, blocks=1)
    drawn = []
    for seed in range(1, 37):
        folder = tmp_path / str(seed)
        folder.mkdir()
        gpt2(folder, width=60, heads=5, blocks=1, seed=seed)
        drawn += [pair.pvalue for pair in compare_heads(strati.open(tmp_path), strati.open(folder))]
    # The best of five partners by the sum of both products, corrected by the factor five.
    assert np.mean(np.array(drawn) < 0.05) < 0.05
    assert np.mean(np.array(drawn) < 0.5) > 0.1


def test_compare_takes_heads(tmp_path: Any) -> None:
    tensors = gpt2(tmp_path)
    other = written(tmp_path / "other", rewritten(tensors, 1)[0], tmp_path)
    comparison = strati.compare(tmp_path, other, heads=True)
    assert len(comparison.heads) == 16 and len(comparison.to_dict()["heads"]) == 16
    one_block = strati.compare(tmp_path, other, heads=True, layers="block:1")
    assert {head.block for head in one_block.heads} == {1}
    assert strati.compare(tmp_path, other).heads is None
    with pytest.raises(strati.StratiError, match="heads"):
        strati.compare({"fc1.weight": np.eye(8)}, {"fc1.weight": 2 * np.eye(8)}, heads=True)
