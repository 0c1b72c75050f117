"""What the summary says: merged LoRAs made by PEFT, full fine-tunes, merges of parents, layers that stand out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import strati
from strati.comparison.layer_statistics import stand_out
from strati.comparison.merging import mixture
from strati.core.errors import BadInputError

torch = pytest.importorskip("torch")
WIDTH = 96


def model(seed: int = 0, dtype: str = "float32"):
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=120,
        max_position_embeddings=32,
        initializer_range=0.05,
    )
    return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))


def merged(targets: list[str], rank: int, dtype: str, size: float = 0.02, **options):
    """A LoRA with trained-looking factors, merged by PEFT itself."""
    import peft

    base = model(dtype=dtype)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    config = peft.LoraConfig(
        r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights=False, **options
    )
    adapted = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = (size * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    return before, adapted.merge_and_unload().state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rank", [2, 8, 16])
def test_a_merged_lora_is_named_with_its_rank_and_place(dtype: str, rank: int) -> None:
    result = strati.compare(*merged(["q_proj", "v_proj"], rank, dtype))
    assert f"This fine-tune is a merged LoRA of rank {rank} on q and v." in result.text()
    for layer in result.layers:
        adapted = layer.role in ("attention.q", "attention.v")
        assert layer.update_kind == ("low-rank" if adapted else "untouched")
        assert layer.update_rank == (rank if adapted else 0)
        assert (layer.update_rank_pvalue is None) != adapted


@pytest.mark.filterwarnings("ignore")
def test_other_places_and_some_blocks_only() -> None:
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    text = strati.compare(*merged(every, 4, "bfloat16")).text()
    assert (
        "of rank 4 on q, k, v, the attention output, the MLP input, the MLP gate and the MLP output." in text
    )
    text = strati.compare(
        *merged(["layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj"], 4, "float32")
    ).text()
    assert "of rank 4 on q and v (2 of 4 such layers)." in text


@pytest.mark.filterwarnings("ignore")
def test_a_rank_for_each_role() -> None:
    mixed = merged(["q_proj", "v_proj"], 8, "bfloat16", rank_pattern={"v_proj": 3})
    assert "is a merged LoRA of rank 8 on q and rank 3 on v." in strati.compare(*mixed).text()
    uneven = merged(["q_proj", "v_proj"], 8, "float32", rank_pattern={"layers.1.self_attn.v_proj": 3})
    assert "merged LoRA" not in strati.compare(*uneven).text()


def fine_tuned(dtype: str, rate: float, frozen: tuple[str, ...] = (), sgd: bool = False):
    """Every weight trained for a few steps on random tokens."""
    net = model()
    before = {name: tensor.clone().to(getattr(torch, dtype)) for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not any(word in name for word in frozen))
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate) if sgd else torch.optim.AdamW(trained, lr=rate)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        tokens = torch.randint(0, 120, (4, 24), generator=generator)
        optimizer.zero_grad()
        net(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return before, {name: tensor.to(getattr(torch, dtype)) for name, tensor in net.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rate", [1e-3, 1e-4])
@pytest.mark.parametrize("frozen", [(), ("embed", "norm", "lm_head")])
def test_a_full_fine_tune_is_not_called_a_merged_lora(
    dtype: str, rate: float, frozen: tuple[str, ...]
) -> None:
    result = strati.compare(*fine_tuned(dtype, rate, frozen))
    assert "LoRA" not in result.text()
    if dtype == "float32":
        body = [x for x in result.layers if x.role.startswith(("attention", "mlp"))]
        assert {x.update_kind for x in body} == {"dense"}


@pytest.mark.filterwarnings("ignore")
def test_gradient_steps_of_low_rank_that_move_the_norms_are_no_lora() -> None:
    assert "LoRA" not in strati.compare(*fine_tuned("float32", 0.1, sgd=True)).text()


@pytest.mark.parametrize(("dtype", "relative"), [("bfloat16", 1e-3), ("bfloat16", 1e-4), ("float16", 1e-5)])
def test_a_full_update_below_the_dtypes_step_is_undecided(dtype: str, relative: float) -> None:
    """Every matrix, norm and embedding gets an update, singular values 1/k; those of the norms vanish in rounding."""
    rng = np.random.default_rng(0)
    kind = getattr(torch, dtype)
    before = {name: tensor.to(kind) for name, tensor in model().state_dict().items()}
    after = {}
    for name, tensor in before.items():
        update = rng.standard_normal(tensor.shape)
        if update.ndim == 2:
            left, _, right = np.linalg.svd(update, full_matrices=False)
            update = (left / np.arange(1, min(update.shape) + 1)) @ right
        start = tensor.double().numpy()
        after[name] = torch.tensor(
            start + update * (relative * np.linalg.norm(start) / np.linalg.norm(update))
        ).to(kind)
    result = strati.compare(before, after)
    assert {layer.update_kind for layer in result.layers} <= {"undecided", "dense"}
    assert "LoRA" not in result.text()
    assert "another dtype" not in result.text()
    checked = strati.check(after, base=before, fail_on="low-rank")
    assert {item.code for item in checked.found} == {"undecided"}


def test_conversions_are_said_to_be_conversions() -> None:
    net = model().state_dict()
    text = strati.compare(net, {name: tensor.bfloat16() for name, tensor in net.items()}).text()
    assert "The weights are the same up to rounding" in text
    assert "LoRA" not in text


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shares", [(0.7, 0.3), (0.5, 0.2, 0.3), (1.4, -0.4)])
def test_mixtures_are_recovered_within_their_errors(dtype, shares: tuple[float, ...], tmp_path: Path) -> None:
    """Parents that differ by one part in a hundred, as fine-tunes of one base do."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    base = {f"fc{i}.weight": rng.standard_normal((40, 30)) for i in range(3)}
    parents = [{k: w + 0.01 * rng.standard_normal(w.shape) for k, w in base.items()} for _ in shares]
    mixed = {k: sum(s * p[k] for s, p in zip(shares, parents, strict=True)) for k in base}
    paths = []
    for i, tensors in enumerate([*parents, mixed]):
        paths.append(tmp_path / f"{i}.safetensors")
        save_file({k: w.astype(dtype) for k, w in tensors.items()}, paths[-1])
    result = strati.compare(*paths, merge=True)
    assert len(result.layers) == 3
    for layer in result.to_dict()["layers"]:
        found = layer["mixture"]
        assert set(found) == {"weights", "stderr", "residual", "hidden"}
        for weight, error, true in zip(found["weights"], found["stderr"], shares, strict=True):
            assert abs(weight - true) < max(5 * error, 1e-6)
            assert error < 0.02
        assert found["residual"] < 1e-3
    assert "in every layer" in result.text()
    if dtype is np.float32:
        assert f"The merge is {shares[0]:.3f} x network 0" in result.text()


def test_errors_of_mixtures_cover_as_often_as_they_say() -> None:
    """400 merges with noise: two standard errors hold the weight in 95.4 %; below 91 % has a chance of 1 in 10,000."""
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        parents = rng.standard_normal((2, 12, 10))
        noisy = 0.6 * parents[0] + 0.4 * parents[1] + 0.05 * rng.standard_normal((12, 10))
        found = mixture(list(parents), noisy)
        inside += sum(
            abs(w - t) < 2 * e for w, t, e in zip(found.weights, (0.6, 0.4), found.stderr, strict=True)
        )
    assert inside > 0.91 * 400


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_errors_of_mixtures_hold_where_rounding_is_all_there_is(dtype: str) -> None:
    """Errors grow with the entries: equal ones assumed, half of the larger weights lie outside. Below 85 %: 1e-9."""
    import ml_dtypes

    rng = np.random.default_rng(1)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    inside = 0
    for _ in range(150):
        parents = (0.02 * rng.standard_normal((2, 24, 32))).astype(kind)
        exact = 0.3 * parents[0].astype(float) + 0.7 * parents[1].astype(float)
        found = mixture(list(parents), exact.astype(kind))
        inside += abs(found.weights[1] - 0.7) < 2 * found.stderr[1]
    assert inside > 0.85 * 150


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("way", ["sum", "products", "running", "parents"])
def test_errors_of_mixtures_hold_however_the_merge_was_rounded(dtype: str, way: str) -> None:
    """Rounding is attracted by parents on the same grid. 40 z-scores: four or more beyond 3 never seen, none beyond 4.

    The sum is rounded, each product is, the running sum too, or the parents are rounded after the merge was made.
    """
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    scores = []
    for seed, shares in enumerate([(0.9, 0.1), (0.7, 0.3), (0.5, 0.5), (0.6, 0.3, 0.1)] * 2):
        rng = np.random.default_rng(seed)
        base = 0.02 * rng.standard_normal((96, 64))
        parents = [base + 0.06 * 0.02 * rng.standard_normal(base.shape) for _ in shares]
        stored = [p.astype(kind) for p in parents]
        used = parents if way == "parents" else [p.astype(float) for p in stored]
        terms = [w * p for w, p in zip(shares, used, strict=True)]
        if way in ("products", "running"):
            terms = [t.astype(kind).astype(float) for t in terms]
        total = terms[0]
        for term in terms[1:]:
            total = (total + term).astype(kind).astype(float) if way == "running" else total + term
        found = mixture(stored, total.astype(kind))
        assert found.residual < 0.03
        scores += [(w - t) / e for w, t, e in zip(found.weights, shares, found.stderr, strict=True)]
    assert np.max(np.abs(scores)) < 4
    assert np.sqrt(np.mean(np.square(scores))) < 1.5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("share", [1 / 3, 0.15])
def test_a_parent_that_is_missing_leaves_what_it_added_unexplained(dtype: str, share: float) -> None:
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rng = np.random.default_rng(0)
    base = 0.02 * rng.standard_normal((96, 64))
    parents = [base + 0.05 * 0.02 * rng.standard_normal(base.shape) for _ in range(3)]
    merge = (1 - share) / 2 * (parents[0] + parents[1]) + share * parents[2]
    nets = [{"fc.weight": w.astype(kind)} for w in (*parents[:2], merge)]
    result = strati.compare(*nets, merge=True)
    # The part of the missing parent that the others cannot explain, over their distance.
    expected = share * np.sqrt(1.5) / np.sqrt(2)
    assert result.layers[0].mixture.residual == pytest.approx(expected, rel=0.1)
    complete = [{"fc.weight": w.astype(kind)} for w in (*parents, merge)]
    assert strati.compare(*complete, merge=True).layers[0].mixture.residual < 0.02
    assert "is a parent missing?" in result.text()


@pytest.mark.parametrize("parents", [2, 3, 4])
def test_errors_of_mixtures_hold_where_sums_cancel_and_where_the_parents_hardly_differ(parents: int) -> None:
    """Exact zeros of a bfloat16 merge carry no information about the weights; 0.3 % is below bfloat16's step."""
    import ml_dtypes

    for seed in range(6):
        for apart in (0.003, 0.01, 0.3):
            rng = np.random.default_rng([seed, parents])
            base = 0.02 * rng.standard_normal((64, 64))
            stored = [
                (base + apart * 0.02 * rng.standard_normal(base.shape)).astype(ml_dtypes.bfloat16)
                for _ in range(parents)
            ]
            total = sum(np.float32(1 / parents) * p.astype(np.float32) for p in stored)
            found = mixture(stored, total.astype(ml_dtypes.bfloat16))
            for weight, error in zip(found.weights, found.stderr, strict=True):
                assert abs(weight - 1 / parents) < 4 * error
            assert found.residual == 0


def test_a_missing_parent_below_the_step_of_the_dtype_is_not_excluded() -> None:
    import ml_dtypes

    rng = np.random.default_rng(0)
    base = 0.02 * rng.standard_normal((96, 64))
    parents = [(base + 6e-5 * rng.standard_normal(base.shape)).astype(ml_dtypes.bfloat16) for _ in range(3)]
    merge = (sum(p.astype(np.float32) for p in parents) / 3).astype(ml_dtypes.bfloat16)
    incomplete = strati.compare(*({"fc.weight": w} for w in (*parents[:2], merge)), merge=True)
    assert incomplete.layers[0].mixture.hidden > 0.3
    assert "cannot be excluded" in incomplete.text()


def test_a_merge_that_cannot_be_told_says_so() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 6))
    assert mixture([weight, weight], weight).weights == (None, None)
    with pytest.raises(BadInputError, match="parents"):
        strati.compare({"a.weight": weight}, {"a.weight": weight}, merge=True)


def test_an_unrelated_network_is_called_no_mixture() -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((60, 40))
    parents = [{"fc.weight": base + 0.01 * rng.standard_normal((60, 40))} for _ in range(2)]
    other = {"fc.weight": rng.standard_normal((60, 40))}
    assert "not a mixture of the others" in strati.compare(*parents, other, merge=True).text()
    both = {"fc.weight": 0.5 * parents[0]["fc.weight"] + 0.5 * parents[1]["fc.weight"]}
    assert "0.500 x network 0 + 0.500 x network 1" in strati.compare(*parents, both, merge=True).text()


def layers_of(changes: np.ndarray, role: str = "mlp.in") -> list[SimpleNamespace]:
    return [
        SimpleNamespace(name=f"{role}.{i}", role=role, block=i, relative_change=c)
        for i, c in enumerate(changes)
    ]


@pytest.mark.parametrize(("networks", "most"), [(100, 14), pytest.param(500, 45, marks=pytest.mark.slow)])
def test_layers_that_stand_out_are_found_and_others_are_not(networks: int, most: int) -> None:
    """Networks of 24 layers without an outlier, level 5 %: more false alarms have a chance below 3e-4."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(networks):
        slope = np.linspace(0, rng.normal(), 12)
        layers = layers_of(np.exp(-4 + slope + 0.3 * rng.standard_normal(12)))
        layers += layers_of(np.exp(-3 + 0.3 * rng.standard_normal(12)), "mlp.out")
        alarms += stand_out(layers)[0].pvalue < 0.05
    assert alarms <= most
    found = 0
    for _ in range(networks // 5):
        changes = np.exp(-4 + 0.3 * rng.standard_normal(12))
        changes[5] *= 8
        first = stand_out(layers_of(changes))[0]
        found += first.layer == "mlp.in.5" and first.pvalue < 0.05
    assert found > 0.85 * (networks // 5)


def test_an_outlier_is_in_the_summary_and_the_json() -> None:
    rng = np.random.default_rng(0)
    base = {
        f"layers.{i}.mlp.up_proj.weight": rng.standard_normal((24, 20)).astype(np.float32) for i in range(10)
    }
    tuned = {
        k: (
            w + (0.3 if ".7." in k else 0.01 * (1 + 0.1 * rng.random())) * rng.standard_normal(w.shape)
        ).astype(np.float32)
        for k, w in base.items()
    }
    result = strati.compare(base, tuned)
    first = result.to_dict()["stand_out"][0]
    assert first["layer"] == "layers.7.mlp.up_proj.weight"
    assert first["pvalue"] < 0.001
    assert "changed unlike the others of their role: layers.7.mlp.up_proj.weight" in result.text()


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_beside_its_base(tmp_path: Path) -> None:
    import peft

    base = model()
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    result = strati.compare(tmp_path / "base", tmp_path / "adapter")
    assert "merged LoRA of rank 4 on q and v" in result.text()


def network_of(name: str) -> Path:
    from strati_reproductions import zoo

    try:
        return zoo.path(name)
    except BadInputError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_the_fine_tuned_minilm_is_no_lora() -> None:
    base, tuned = network_of("minilm"), network_of("minilm-tuned")
    result = strati.compare(base, tuned, layers=["role:attention.*", "role:mlp.*", "role:linear"])
    assert "LoRA" not in result.text()
    kinds = [layer.update_kind for layer in result.layers]
    assert kinds.count("untouched") == 1  # the pooler
    assert kinds.count("dense") == len(kinds) - 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_full_fine_tune_of_stories15m_is_no_lora(dtype: str) -> None:
    net = strati.as_module(network_of("stories15m"))
    kind = getattr(torch, dtype)
    before = {name: tensor.detach().clone().to(kind) for name, tensor in net.state_dict().items()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(3, 2000, (2, 32), generator=generator)
        optimizer.zero_grad()
        logits = net(tokens)
        logits = getattr(logits, "logits", logits)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    after = {name: tensor.detach().to(kind) for name, tensor in net.state_dict().items()}
    result = strati.compare(before, after, layers=["block:0", "block:5"])
    assert "LoRA" not in result.text()
    if dtype == "float32":
        assert {layer.update_kind for layer in result.layers} == {"dense"}


def adapters(tmp_path: Path, seeds: tuple[int, int]) -> list[Path]:
    """Two trained-looking LoRA adapters on q; one seed for both gives the same directions."""
    import peft

    folders = []
    for n, seed in enumerate(seeds):
        config = peft.LoraConfig(r=3, lora_alpha=3, target_modules=["q_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model(), config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)
        folders.append(tmp_path / str(n))
        adapted.save_pretrained(folders[-1])
    return folders


@pytest.mark.filterwarnings("ignore")
def test_two_adapters_say_whether_they_write_the_same(tmp_path: Path) -> None:
    same = strati.compare(*adapters(tmp_path / "same", (1, 1)))
    apart = strati.compare(*adapters(tmp_path / "apart", (1, 2)))
    for layer in same.layers:
        assert layer.interference.cosine == pytest.approx(1.0)
        assert layer.interference.written_overlap == pytest.approx(1.0)
    for layer in apart.layers:
        assert abs(layer.interference.cosine) < 0.1
        assert layer.interference.by_chance == pytest.approx(3 / WIDTH)
        assert layer.interference.written_overlap < 0.2
    assert "the directions they write overlap" in apart.text()


def trained_model(seed: int = 0) -> dict[str, np.ndarray]:
    """A small Llama whose norms are not all 1."""
    rng = np.random.default_rng(seed)
    tensors = {name: tensor.numpy() for name, tensor in model(seed).state_dict().items()}
    return {
        name: np.exp(0.3 * rng.standard_normal(w.shape)).astype(np.float32) if "norm" in name else w
        for name, w in tensors.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_abliteration_is_named_and_is_no_lora(dtype: str) -> None:
    """One direction of the residual stream is projected out of everything that writes to it (arXiv 2406.11717)."""
    import ml_dtypes

    stored_as = np.dtype(getattr(ml_dtypes, dtype, dtype))
    base = {name: w.astype(stored_as) for name, w in trained_model().items()}
    direction = np.random.default_rng(1).standard_normal(WIDTH)
    direction /= np.linalg.norm(direction)
    removed = dict(base)
    writers = [name for name in base if name.endswith(("o_proj.weight", "down_proj.weight"))]
    for name in writers:
        w = base[name].astype(np.float64)
        removed[name] = (w - np.outer(direction, direction @ w)).astype(stored_as)
    result = strati.compare(base, removed)
    assert result.removed_direction == len(writers) == 4
    by_name = {layer.name: layer for layer in result.layers}
    assert {by_name[name].pattern for name in writers} == {"projection"}
    assert "abliteration" in result.lines()[0] and "merged LoRA" not in result.text()
    added = dict(base)
    rng = np.random.default_rng(2)
    for name in writers:  # a LoRA of rank 1 adds something instead
        rows, columns = base[name].shape
        step = 0.05 * np.outer(rng.standard_normal(rows), rng.standard_normal(columns))
        added[name] = (base[name].astype(np.float64) + step).astype(stored_as)
    lora = strati.compare(base, added)
    assert lora.removed_direction == 0 and "abliteration" not in lora.text()
    assert "merged LoRA of rank 1" in lora.lines()[0]


def test_directions_that_differ_from_layer_to_layer_are_no_abliteration() -> None:
    base = trained_model()
    removed = dict(base)
    rng = np.random.default_rng(3)
    for name in (name for name in base if name.endswith(("o_proj.weight", "down_proj.weight"))):
        direction = rng.standard_normal(WIDTH)
        direction /= np.linalg.norm(direction)
        removed[name] = (base[name] - np.outer(direction, direction @ base[name])).astype(np.float32)
    assert strati.compare(base, removed).removed_direction <= 1


def test_half_of_the_entries_zero_and_dequantised_integers_are_named() -> None:
    base = trained_model()

    def in_blocks(change) -> dict[str, np.ndarray]:
        return {n: np.float32(change(w)) if "layers" in n and w.ndim == 2 else w for n, w in base.items()}

    zeros = strati.compare(base, in_blocks(lambda w: np.where(np.abs(w) < np.median(np.abs(w)), 0, w)))
    moved = [layer for layer in zeros.layers if layer.relative_change]
    assert {layer.pattern for layer in moved} == {"zeros"} and len(moved) == 14
    assert all(layer.pattern_share == pytest.approx(0.5, abs=0.01) for layer in moved)
    assert "14 of 16 layers were pruned" in zeros.lines()[0] and "50%" in zeros.text()

    def rounded_rows(w: np.ndarray) -> np.ndarray:
        step = np.abs(w).max(axis=1, keepdims=True) / 7
        return np.rint(w / step) * step

    integers = strati.compare(base, in_blocks(rounded_rows))
    moved = [layer for layer in integers.layers if layer.relative_change]
    assert {layer.pattern for layer in moved} == {"grid"} and len(moved) == 14
    assert "dequantised integers" in integers.lines()[0]


def test_norms_folded_into_the_layers_behind_them_are_undone() -> None:
    """The folded network computes the same function; its norms are 1 and nothing else differs by more than rounding."""
    base = trained_model()
    folded = dict(base)
    for block in range(2):
        prefix = f"model.layers.{block}."
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            gain = base[f"{prefix}{norm}.weight"]
            folded[f"{prefix}{norm}.weight"] = np.ones_like(gain)
            for reader in readers:
                folded[f"{prefix}{reader}.weight"] = base[f"{prefix}{reader}.weight"] * gain
    result = strati.compare(base, folded)
    undone = [layer.name for layer in result.layers if layer.aligned == "folded-norm"]
    assert len(undone) == 10
    assert all((layer.relative_change or 0) < 1e-6 for layer in result.layers)
    assert result.movement is not None and result.movement.vectors_moved == 0
    assert strati.check(folded, base, workers=1).passed
    wrong = folded | {"model.layers.1.input_layernorm.weight": np.full(WIDTH, 1.5, np.float32)}
    assert not strati.check(wrong, base, workers=1).passed


def test_interference_of_two_fine_tunes_of_one_base_names_the_layer_that_a_merge_would_damage() -> None:
    base = trained_model()
    rng = np.random.default_rng(4)
    opposed = "model.layers.1.mlp.up_proj.weight"
    first, second = dict(base), dict(base)
    for name in (name for name, w in base.items() if "layers" in name and w.ndim == 2):
        steps = [0.05 * base[name].std() * rng.standard_normal(base[name].shape) for _ in range(2)]
        first[name] = (base[name] + steps[0]).astype(np.float32)
        second[name] = (base[name] + (-0.8 * steps[0] if name == opposed else steps[1])).astype(np.float32)
    result = strati.compare(base, first, second)
    by_name = {layer.name: layer.interference for layer in result.layers if layer.interference is not None}
    assert len(by_name) == 14
    assert [name for name, pair in by_name.items() if pair.opposed] == [opposed]
    assert by_name[opposed].sign_conflicts > 0.99 and by_name[opposed].cosine == pytest.approx(-1, abs=1e-3)
    others = [pair for name, pair in by_name.items() if name != opposed]
    assert all(abs(pair.sign_conflicts - 0.5) < 0.05 and abs(pair.zscore) < 5 for pair in others)
    assert all(pair.networks == (1, 2) for pair in by_name.values())
    assert "A merge would damage" in result.text() and "1.mlp.up_proj" in result.text()
