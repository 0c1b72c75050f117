"""The fast paths give what full forward passes give, on chains and on transformers' classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr, softmax
from torch import Tensor, nn

from strati.interventions.cached_forward import (
    ActivationCache,
    Recording,
    measure_module,
    whole_performance,
)
from strati.interventions.evaluator import ChainProbe
from strati.interventions.initialisers import scheme_of
from strati.interventions.metrics import Disagreement, as_rows
from strati.interventions.targets import Change, Target, changed, find_targets, values_of
from strati.interventions.tasks import StudyData, Task, make_task
from strati.landscape.mlp.sequential import as_chain
from strati_reproductions.trained.networks import MLP, CifarResNet, Transformer

RNG = np.random.default_rng(0)


def images(n: int = 6, size: int = 32) -> StudyData:
    return StudyData(
        "images",
        10,
        np.empty(0),
        None,
        RNG.integers(0, 256, (n, 3, size, size), np.uint8),
        RNG.integers(0, 10, n),
    )


def tokens(vocabulary: int, n: int = 4, length: int = 9) -> StudyData:
    return StudyData("tokens", vocabulary, np.empty(0), None, RNG.integers(0, vocabulary, (n, length)), None)


def rows(n: int = 50, width: int = 12) -> StudyData:
    return StudyData("rows", 5, np.empty(0), None, RNG.standard_normal((n, width)), RNG.integers(0, 5, n))


def hugging_face(name: str) -> tuple[nn.Module, Task]:
    import transformers

    small: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16)
        return transformers.GPT2LMHeadModel(config).eval(), make_task(tokens(40), "loss", 3)
    if name == "llama":
        config = transformers.LlamaConfig(**small, vocab_size=40, max_position_embeddings=16)
        return transformers.LlamaForCausalLM(config).eval(), make_task(tokens(40), "perplexity", 3)
    if name == "bert":
        config = transformers.BertConfig(**small, vocab_size=40, num_labels=3)
        data = StudyData("tokens", 3, np.empty(0), None, RNG.integers(0, 40, (5, 7)), RNG.integers(0, 3, 5))
        return transformers.BertForSequenceClassification(config).eval(), make_task(data, "accuracy", 3)
    if name == "vit":
        config = transformers.ViTConfig(**small, image_size=32, patch_size=8, num_labels=10)
        return transformers.ViTForImageClassification(config).eval(), make_task(images(), "loss", 4)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], layer_type="basic", num_labels=10
    )
    return transformers.ResNetForImageClassification(config).eval(), make_task(images(), "loss", 4)


def own(name: str) -> tuple[nn.Module, Task]:
    torch.manual_seed(0)
    if name == "resnet":
        return CifarResNet(8, 4).eval(), make_task(images(size=16), "loss", 4)
    if name == "transformer":
        return Transformer(40, 16, 2, 2, 16).eval(), make_task(tokens(40), "loss", 3)
    return MLP([12, 9, 7, 5]).eval(), make_task(rows(), "accuracy", 20)


def changes_of(model: nn.Module, target: Target, count: int = 2) -> list[Change]:
    found = []
    for draw in range(count):
        weight, bias, text = scheme_of(model, "pytorch").draw(
            target, values_of(model, target), np.random.default_rng(draw)
        )
        found.append(Change("rerandomise", draw, weight, bias, text))
    return found


def full(model: nn.Module, task: Task) -> float:
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in task.batches:
            total += task.add_up(task.output(model, inputs), targets)
            count += task.count(targets)
    return task.finish(total, count)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "vit", "hf-resnet", "resnet", "transformer", "mlp"]
)
def test_replaying_equals_full_passes_in_every_layer(name: str) -> None:
    model, task = own(name) if name in ("resnet", "transformer", "mlp") else hugging_face(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    targets = find_targets(model)
    assert len(targets) >= 3
    tapes = ActivationCache()  # carried from layer to layer, and back again at the end
    for target in (*targets, targets[0]):
        changes = changes_of(model, target, count=5)  # enough for some to share a pass
        found = measure_module(model, task, target, changes, tapes=tapes)
        for change, one in zip(changes, found, strict=True):
            with changed(model, target, change):
                assert one.performance == pytest.approx(full(model, task), rel=1e-6), target.name
        alone = measure_module(model, task, target, changes[:1], tapes=tapes)
        with changed(model, target, changes[0]):
            assert alone[0].performance == full(model, task), target.name
        for shared, single in zip(found[:1], alone, strict=True):
            assert shared.activations == pytest.approx(single.activations, rel=1e-5, abs=1e-9)
    assert whole_performance(model, task) == full(model, task)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_replaying_skips_what_came_before() -> None:
    model, task = own("transformer")
    calls: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, _o, name=name: calls.append(name))
    with torch.inference_mode(), Recording(model, "blocks.1.up_proj") as tape:
        tape.run(lambda: task.output(model, task.batches[0][0]))
    assert calls[-1] == "blocks.1.up_proj"  # the recorded pass ends at the layer
    calls.clear()
    with torch.inference_mode(), tape.replayed():
        task.output(model, task.batches[0][0])
    # hooks of replayed modules still run, their inner ones do not
    assert not any(name.startswith("blocks.0.") for name in calls)


def test_the_next_layers_recording_starts_where_the_last_one_ended() -> None:
    model, task = own("transformer")
    targets = {t.name: t for t in find_targets(model)}
    tapes = ActivationCache()
    calls: list[str] = []
    measure_module(model, task, targets["blocks.1.q_proj"], [], tapes=tapes)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, _o, name=name: calls.append(name))
    measure_module(model, task, targets["blocks.1.up_proj"], [], tapes=tapes)
    assert calls and not any(name.startswith("blocks.0.") for name in calls)


class InPlace(nn.Module):
    """Adds to its parts' outputs in place, as much public code does; calls one part twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y += x
        z = self.a(torch.relu_(y))
        z += self.b(y)
        out: Tensor = self.c(z)
        return out


class Siblings(nn.Module):
    """Two layers of one input; before the second, the first may have been added to that input in place."""

    def __init__(self, spoiled: bool) -> None:
        super().__init__()
        self.start, self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.end, self.spoiled = nn.Linear(12, 5), spoiled

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        first = self.a(x)
        if self.spoiled:
            x += first
        out: Tensor = self.end(first * torch.tanh(self.b(x)))
        return out


@pytest.mark.parametrize("spoiled", [False, True])
def test_siblings_that_get_the_same_input_run_once(spoiled: bool) -> None:
    torch.manual_seed(0)
    model, task = Siblings(spoiled).eval(), make_task(rows(), "loss", 50)
    target = next(t for t in find_targets(model) if t.name == "a")
    changes = changes_of(model, target, count=3)
    want = []
    for change in changes:
        with changed(model, target, change):
            want.append(full(model, task))
    runs: list[int] = []
    plain = model.b.forward

    def counted(x: Tensor) -> Tensor:
        runs.append(1)
        return plain(x)

    model.b.forward = counted  # type: ignore[method-assign]
    found = measure_module(model, task, target, changes)
    assert [one.performance for one in found] == want
    assert len(runs) > 1 if spoiled else len(runs) == 1


class Mixing(nn.Module):
    """What one row gives depends on the others in its batch, or the batch has to be of one size."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(12, 12), nn.Linear(12, 5), how

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        if self.how == "mixes":
            y = y - y.max(0).values
        elif self.how == "refuses":
            y = y.view(25, 12)
        out: Tensor = self.b(y)
        return out


@pytest.mark.parametrize("how", ["plain", "mixes", "refuses"])
def test_changes_share_a_pass_only_where_that_changes_nothing(how: str) -> None:
    torch.manual_seed(0)
    model, task = Mixing(how).eval(), make_task(rows(), "loss", 25)
    passes: list[int] = []
    model.b.register_forward_hook(lambda _m, _i, out: passes.append(len(out)))
    target = next(t for t in find_targets(model) if t.name == "a")
    changes = changes_of(model, target, count=9)
    found = measure_module(model, task, target, changes)
    shared = [n for n in passes if n > 25]
    # two batches, all nine changes in one pass each; where that fails, only the trial
    assert shared == {"plain": [225, 225], "mixes": [225], "refuses": []}[how]
    for change, one in zip(changes, found, strict=True):
        with changed(model, target, change):
            assert one.performance == pytest.approx(full(model, task), rel=1e-6)


def test_in_place_changes_and_repeated_calls_do_not_disturb_the_tape() -> None:
    torch.manual_seed(0)
    model, task = InPlace().eval(), make_task(rows(), "loss", 20)
    for target in find_targets(model):
        changes = changes_of(model, target)
        found = measure_module(model, task, target, changes)
        for change, one in zip(changes, found, strict=True):
            with changed(model, target, change):
                assert one.performance == full(model, task)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_a_chain_in_stacked_products_equals_full_passes(activation: str) -> None:
    torch.manual_seed(0)
    model = MLP([12, 9, 7, 5], activation).eval()
    for performance in ("accuracy", "loss"):
        task = make_task(rows(), performance, 20)
        probe = ChainProbe(as_chain(model), task)
        assert probe.performance == pytest.approx(full(model, task), rel=1e-6)
        for target in find_targets(model):
            changes = changes_of(model, target, 3)
            slow = measure_module(model, task, target, changes)
            for change, one, other in zip(changes, probe.measure(target, changes), slow, strict=True):
                with changed(model, target, change):
                    assert one.performance == pytest.approx(full(model, task), rel=1e-5)
                assert one.activations == pytest.approx(other.activations, rel=1e-4)


def test_disagreement_and_divergence_by_their_definitions() -> None:
    intact, other = RNG.standard_normal((2, 40, 6)).astype(np.float32)
    both = Disagreement(1)
    for part in (slice(0, 15), slice(15, 40)):
        both.add(torch.from_numpy(intact[part]), torch.from_numpy(other[part])[None])
    found = both.result(0)
    assert found["activation_disagreement"] == pytest.approx(100 * np.mean((intact > 0) != (other > 0)))
    p, q = (np.exp(a) / np.exp(a).sum(1, keepdims=True) for a in (intact, other))
    want = np.mean([jensenshannon(a, b) ** 2 for a, b in zip(p, q, strict=True)])
    assert found["js_divergence"] == pytest.approx(want, rel=1e-5)


def test_equal_layers_neither_disagree_nor_diverge_even_far_out() -> None:
    wild = torch.tensor([[1e4, -1e4, 0.0]])
    both = Disagreement(1)
    both.add(wild, wild[None])
    assert both.result(0) == {"activation_disagreement": 0.0, "js_divergence": 0.0}


def test_pixels_are_neurons_and_tokens_are_data() -> None:
    assert as_rows(torch.zeros(3, 4, 5, 5), "conv").shape == (3, 100)
    assert as_rows(torch.zeros(3, 7, 8), "linear").shape == (21, 8)


@pytest.mark.parametrize("step", [1e-3, 3e-2, 1.0, 30.0])
def test_divergence_keeps_its_digits_however_small(step):
    """Against the definition in double precision; divergences down to 1e-7 are those of single outputs' change."""
    rng = np.random.default_rng(7)
    intact = rng.normal(size=(20, 64)).astype(np.float32)
    other = (intact + step * rng.normal(size=(20, 64))).astype(np.float32)
    both = Disagreement(1)
    both.add(torch.from_numpy(intact), torch.from_numpy(other)[None])
    p, q = softmax(intact.astype(float), axis=1), softmax(other.astype(float), axis=1)
    middle = (p + q) / 2
    exact = (rel_entr(p, middle).sum(1) + rel_entr(q, middle).sum(1)).mean() / 2
    found = both.result(0)
    assert found["js_divergence"] == pytest.approx(exact, rel=1e-4)
    assert found["activation_disagreement"] == pytest.approx(100 * np.mean((intact > 0) != (other > 0)))
