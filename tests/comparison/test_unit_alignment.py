"""Hidden units in another order: planted permutations, signs and scales are undone exactly, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import run_strati
from safetensors.numpy import load_file, save_file

import strati
from strati import embedded
from strati.core.errors import BadInputError

TRAINED = embedded.path("digits-mlp.safetensors")
RESNET = Path(__file__).resolve().parents[3] / "shared/data/resnet20-cifar10/resnet20-12fca82f.th"


def shuffled(tensors: dict[str, np.ndarray], seed: int = 0, scales: np.ndarray | None = None):
    """The same function with the neurons of both hidden layers in another order, the first ones rescaled."""
    rng = np.random.default_rng(seed)
    first, second = rng.permutation(96), rng.permutation(64)
    factor = np.ones(96, np.float32) if scales is None else scales.astype(np.float32)
    new = dict(tensors)
    new["0.weight"] = tensors["0.weight"][first] * factor[:, None]
    new["0.bias"] = tensors["0.bias"][first] * factor
    new["2.weight"] = tensors["2.weight"][second][:, first] / factor
    new["2.bias"] = tensors["2.bias"][second]
    new["4.weight"] = np.ascontiguousarray(tensors["4.weight"][:, second])
    return new


@pytest.fixture(scope="module")
def trained() -> dict[str, np.ndarray]:
    return load_file(TRAINED)


def test_a_permuted_mlp_is_the_same_network(trained: dict[str, np.ndarray]) -> None:
    for seed in range(3):
        result = strati.compare(trained, shuffled(trained, seed))
        assert {(x.update_kind, x.aligned, x.relative_change) for x in result.layers} == {
            ("untouched", "units", 0.0)
        }
        assert result.movement.moved == 0
        assert result.related is True


def test_a_permuted_network_that_was_trained_on_has_its_true_change(trained: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(1)
    tuned = {
        k: (w + 0.1 * w.std() * rng.standard_normal(w.shape)).astype(w.dtype) for k, w in trained.items()
    }
    straight, crossed = (strati.compare(trained, net) for net in (tuned, shuffled(tuned)))
    for a, b in zip(straight.layers, crossed.layers, strict=True):
        assert (a.aligned, b.aligned) == (None, "units")
        assert b.relative_change == pytest.approx(a.relative_change, rel=1e-9)


def test_scales_and_signs_where_the_activation_allows(trained: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    scaled = shuffled(trained, scales=np.exp(rng.standard_normal(96)))
    result = strati.compare(trained, scaled)
    assert {x.update_kind for x in result.layers} == {"rounding", "untouched"}
    assert max(x.relative_change for x in result.layers) < 1e-6
    signed = shuffled(trained, scales=rng.choice([-1.0, 1.0], 96))
    assert {x.update_kind for x in strati.compare(trained, signed, activation="tanh").layers} == {"untouched"}
    # ReLU is no odd function: a network with other signs is another network.
    assert strati.compare(trained, signed).layers[0].relative_change > 0.5
    assert strati.compare(trained, scaled, activation="gelu").layers[0].relative_change > 0.5


def test_nothing_is_renumbered_that_does_not_come_far_closer(trained: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    other = {k: rng.standard_normal(w.shape).astype(w.dtype) for k, w in trained.items()}
    result = strati.compare(trained, other)
    assert {x.aligned for x in result.layers} == {None}
    assert result.related is False
    broken = shuffled(trained) | {"2.weight": np.full((64, 96), np.nan, np.float32)}
    assert {x.aligned for x in strati.compare(trained, broken).layers} == {None}


def test_the_aligned_network_is_written(trained: dict[str, np.ndarray], tmp_path: Path) -> None:
    source, target = tmp_path / "b.safetensors", tmp_path / "c.safetensors"
    save_file({k: np.ascontiguousarray(w) for k, w in shuffled(trained).items()}, source)
    done = run_strati("compare", TRAINED, source, "--align", target)
    assert done.returncode == 0, done.stderr
    written = load_file(target)
    assert all(np.array_equal(written[name], w) for name, w in trained.items())
    again = run_strati("compare", TRAINED, source, "--align", target)
    assert (again.returncode, "exists" in again.stderr) == (2, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.safetensors", "c.safetensors"]


def test_the_barrier_between_a_network_and_its_permuted_self_vanishes(
    trained: dict[str, np.ndarray], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    source = tmp_path / "b.safetensors"
    save_file({k: np.ascontiguousarray(w) for k, w in shuffled(trained).items()}, source)
    words = ["compare", TRAINED, source, "--path", "--data", embedded.path("digits.npz")]
    done = run_strati(*words, "--json", "-")
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout)["path"]
    assert len(path["positions"]) == len(path["stored"]["loss"]) == 11
    assert path["stored"]["barrier"] > 20 * path["stored"]["barrier_stderr"] > 0
    assert abs(path["aligned"]["barrier"]) < 1e-6
    assert path["aligned"]["loss"] == pytest.approx([path["stored"]["loss"][0]] * 11, rel=1e-5)
    alone = run_strati("compare", TRAINED, source, "--path")
    assert (alone.returncode, "--data" in alone.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [1, 2])
def test_the_barrier_between_wide_networks_on_mnist_vanishes_after_alignment(hidden: int) -> None:
    """Two trainings of an MLP of width 512 (arXiv 2209.04836, section 5)."""
    torch = pytest.importorskip("torch")
    fetch = pytest.importorskip("strati_reproductions.zoo.fetch")
    from strati.tracking.measure import loss_path

    with np.load(fetch.path("mnist")) as arrays:
        x = torch.tensor(arrays["x_train"].reshape(-1, 784) / 255, dtype=torch.float32)
        y = torch.tensor(arrays["y_train"], dtype=torch.int64)
    networks = []
    for seed in range(2):
        torch.manual_seed(seed)
        middle = [m for _ in range(hidden - 1) for m in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
        net = torch.nn.Sequential(
            torch.nn.Linear(784, 512), torch.nn.ReLU(), *middle, torch.nn.Linear(512, 10)
        )
        optimiser = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(300):
            rows = torch.randint(len(x), (200,))
            loss = torch.nn.functional.cross_entropy(net(x[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        networks.append(net)
    path = loss_path(*networks, (x[:2000].numpy(), y[:2000].numpy()), points=5)
    assert path.stored.barrier > max(0.1, 10 * path.stored.barrier_stderr)
    assert path.aligned is not None and path.aligned.barrier < 0.02 * path.stored.barrier + 0.003


def test_barriers_are_those_of_a_direct_computation() -> None:
    """A line of three points, by hand, on a linear network: the loss is quadratic along it, the barrier negative."""
    torch = pytest.importorskip("torch")
    from strati.tracking.measure import loss_path

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 4)).astype(np.float32), rng.standard_normal((50, 2)).astype(np.float32)
    nets = [torch.nn.Linear(4, 2) for _ in range(2)]
    before = [{k: v.clone() for k, v in net.state_dict().items()} for net in nets]
    path = loss_path(*nets, (x, y), points=5)
    for t, loss in zip(path.positions, path.stored.loss, strict=True):
        weight, bias = (
            ((1 - t) * before[0][k] + t * before[1][k]).numpy().astype(np.float64) for k in ("weight", "bias")
        )
        assert loss == pytest.approx(np.square(x @ weight.T + bias - y).sum(axis=1).mean(), rel=1e-5)
    assert path.stored.barrier == 0.0
    assert all(torch.equal(v, before[0][k]) for k, v in nets[0].state_dict().items())


def test_channels_of_convolutions_with_batch_norm_and_a_flattened_map() -> None:
    rng = np.random.default_rng(0)
    net = {
        "0.weight": rng.standard_normal((16, 3, 3, 3)),
        "0.bias": rng.standard_normal(16),
        **{f"1.{n}": rng.standard_normal(16) for n in ("weight", "bias", "running_mean", "running_var")},
        "3.weight": rng.standard_normal((24, 16, 3, 3)),
        "3.bias": rng.standard_normal(24),
        "6.weight": rng.standard_normal((10, 24 * 16)),
        "6.bias": rng.standard_normal(10),
    }
    first, second = rng.permutation(16), rng.permutation(24)
    new = {k: w[first] if k.startswith(("0.", "1.")) else w for k, w in net.items()}
    new |= {"3.weight": net["3.weight"][second][:, first], "3.bias": net["3.bias"][second]}
    new["6.weight"] = net["6.weight"].reshape(10, 24, 16)[:, second].reshape(10, -1)
    result = strati.compare(net, new)
    assert {(x.update_kind, x.aligned) for x in result.layers} == {("untouched", "units")}
    assert result.movement.moved == 0


def llama(groups: int):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=groups,
        vocab_size=60,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("groups", [8, 2, 1])
def test_heads_groups_and_gated_units_of_a_llama(groups: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(groups)
    base = llama(groups)
    state = {k: v.clone() for k, v in base.state_dict().items()}
    prefix = "model.layers.0."
    by_group = np.roll(np.arange(groups), 1)
    each = 8 // groups
    heads = np.concatenate([g * each + rng.permutation(each) for g in by_group])
    for name, order in (("q", heads), ("k", by_group), ("v", by_group)):
        rows = (order[:, None] * 8 + np.arange(8)).ravel()
        state[f"{prefix}self_attn.{name}_proj.weight"] = state[f"{prefix}self_attn.{name}_proj.weight"][rows]
    columns = (heads[:, None] * 8 + np.arange(8)).ravel()
    state[f"{prefix}self_attn.o_proj.weight"] = state[f"{prefix}self_attn.o_proj.weight"][:, columns]
    units = rng.permutation(96)
    factor = torch.tensor(rng.choice([-1.0, 1.0], 96) * 2.0 ** rng.integers(-2, 3, 96)).float()
    state[f"{prefix}mlp.gate_proj.weight"] = state[f"{prefix}mlp.gate_proj.weight"][units]
    state[f"{prefix}mlp.up_proj.weight"] = state[f"{prefix}mlp.up_proj.weight"][units] * factor[:, None]
    state[f"{prefix}mlp.down_proj.weight"] = state[f"{prefix}mlp.down_proj.weight"][:, units] / factor
    other = llama(groups)
    other.load_state_dict(state)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.allclose(base(tokens).logits, other(tokens).logits, atol=1e-5)
    result = strati.compare(base, other)
    assert {x.update_kind for x in result.layers} == {"untouched"}
    assert sum(x.aligned == "units" for x in result.layers) >= (7 if groups > 1 else 5)


class Renumbered:
    """A layer whose units were planted in another order."""

    def __init__(self, layer, renumbering) -> None:
        self.layer, self.renumbering = layer, renumbering

    def __getattr__(self, name: str):
        return getattr(self.layer, name)

    def matrices(self):
        for matrix in self.layer.matrices():
            yield matrix if self.renumbering is None else self.renumbering.apply(matrix)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("minilm", "minilm-tuned", "stories15m", "mnist-cnn", "cifar-cnn", "efficientnet", "mobilenetv2"),
        *("whisper", "silero/silero.safetensors", "geoclip/location_encoder.pth", "spliceai/spliceai1.h5"),
        *("resnet20", "smollm2"),
    ],
)
def test_permutations_planted_into_real_networks_are_recovered_exactly(name: str) -> None:
    fetch = pytest.importorskip("strati_reproductions.zoo.fetch")
    from strati.comparison import unit_alignment as units

    network, _, file = name.partition("/")
    try:
        net = strati.open(RESNET if name == "resnet20" else Path(fetch.path(network)) / file)
    except BadInputError as error:
        pytest.skip(str(error))
    rng = np.random.default_rng(0)
    planted = {}
    for group in units._interface_groups(net, net, [(x, x) for x in net.layers()], None):
        for interface in (i for i in group if not i.block):
            interface.take(rng.permutation(interface.units), np.ones(interface.units))
        for pair in (m.pair for i in group for m in i.members):
            planted[pair.second.name] = pair.renumbering()
    assert planted
    pairs = [(x, Renumbered(x, planted.get(x.name))) for x in net.layers()]
    order = units.unit_order(net, net, pairs)
    for layer, other in pairs:
        back = order.layers.get(layer.name, units.Renumbering())
        for a, b in zip(layer.matrices(), other.matrices(), strict=True):
            assert np.array_equal(a, back.apply(b))


def test_heads_and_neurons_of_bert_and_of_a_fused_gpt2() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=96))
    gpt2 = transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=60, n_embd=64, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    heads = (torch.tensor([2, 0, 3, 1])[:, None] * 16 + torch.arange(16)).ravel()
    stacked = torch.cat([heads, heads + 64, heads + 128])
    rows = {"layer.0.intermediate.dense": torch.randperm(96), "h.0.mlp.c_fc": torch.randperm(256)}
    rows |= {f"layer.0.attention.self.{part}": heads for part in ("query", "key", "value")}
    rows["h.0.attn.c_attn"] = stacked
    columns = {
        "layer.0.output.dense": rows["layer.0.intermediate.dense"],
        "h.0.mlp.c_proj": rows["h.0.mlp.c_fc"],
    }
    columns |= {"layer.0.attention.output.dense": heads, "h.0.attn.c_proj": heads}
    for net in (bert, gpt2):
        state = {}
        for name, tensor in net.state_dict().items():
            module, _, kind = name.removeprefix("encoder.").rpartition(".")
            turned = net is gpt2 and kind == "weight"  # Conv1D keeps inputs first
            new = tensor + 0.01 * torch.randn_like(tensor) if kind == "bias" else tensor
            net.load_state_dict({name: new}, strict=False)
            if module in rows:
                new = new[:, rows[module]] if turned else new[rows[module]]
            if module in columns and kind == "weight":
                new = new[columns[module]] if turned else new[:, columns[module]]
            state[name] = new.clone()
        other = type(net)(net.config)
        other.load_state_dict(state)
        result = strati.compare(net, other)
        assert {x.update_kind for x in result.layers} == {"untouched"}
        assert sum(x.aligned == "units" for x in result.layers) == (6 if net is bert else 4)
        assert result.movement.moved == 0
