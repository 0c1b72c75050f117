"""Section 5 of degeneracy-in-the-loss-landscape as experiments: do free directions add up, and links as logarithms?

5.2.1: free directions of disjoint modules add up. Eqs. 31-32: a module that others read counts with what they read
held fixed. Eqs. 34-35: a link of weight ``w`` costs ``1 - 2 ln w / ln eps`` of a full one, so that two weak links cost
as much as one strong one. Volumes are counted by sampling, ranks are those of exact Jacobians.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap

from strati.papers.pictures import OURS, THEORY, drawn, panels, save
from strati.papers.registry import Reproduction, Row
from strati.rng import derive, stream
from strati.types import Tick

if TYPE_CHECKING:
    from strati.types import FloatArray

_RANK = 1e-9


def section_five(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Free directions of modules, constrained losses, and the log law of links."""
    networks = 10 if quick else 50
    rows = [*_disjoint(networks, seed)]
    tick("disjoint modules")
    rows += _constrained(networks, seed)
    tick("constrained losses")
    rows += _links(100_000 if quick else 500_000, seed)
    tick("links")
    figures = drawn(_draw_links, rows, folder)
    return Reproduction("modules-section-5", "Modules and degeneracy, section 5", tuple(rows), figures)


def _draw_links(rows: list[Row], folder: Path) -> tuple[str, ...]:
    """The log law: the share of a full link that a link of weight eps^k costs, against k."""
    links = [r for r in rows if r.what.startswith("one link")]
    powers = [float(r.what.partition("^")[2].partition(":")[0]) for r in links]
    figure, (axis,) = panels(1, title="What a link of weight eps^k costs (eq. 34)", size=(5.0, 3.4))
    axis.plot(powers, [float(r.theory or 0.0) for r in links], color=THEORY, label="1 - 2k")
    axis.plot(powers, [float(r.ours or 0.0) for r in links], "o", color=OURS, label="counted")
    axis.set(xlabel="k", ylabel="share of a full link")
    axis.legend(frameon=False)
    return save(figure, folder, "links")


def _disjoint(networks: int, seed: int) -> list[Row]:
    """Rank of the behavioural Hessian of two modules side by side against the sum of theirs (5.2.1)."""
    equal, example = 0, ""
    for number in range(networks):
        modules = [_module(seed, number, part, outputs=2) for part in (1, 2)]
        data = [_inputs(seed, number, part) for part in (1, 2)]
        alone = [_rank(_jacobian(m, x)) for m, x in zip(modules, data, strict=True)]
        together = _rank(_jacobian(_SideBySide(*modules), _concatenated(*data)))
        size = sum(p.numel() for m in modules for p in m.parameters())
        free = [sum(p.numel() for p in m.parameters()) - r for m, r in zip(modules, alone, strict=True)]
        equal += together == sum(alone)
        example = f"e.g. {free[0]} + {free[1]} against {size - together} free together"
    return [
        Row("disjoint modules: free directions add up (5.2.1)", "always", f"{equal} of {networks}", example)
    ]


def _constrained(networks: int, seed: int) -> list[Row]:
    """``N_eff`` of two modules joined by a node against ``L_2`` plus ``L_1,C`` (eq. 31), the link held fixed."""
    equal = above = plain = 0
    gaps = []
    for number in range(networks):
        first = _module(seed, number, 1, outputs=3)  # two outputs of its own, and the mediating node
        second = _module(seed, number, 2, outputs=2, inputs=4)  # reads the node as its fourth input
        joint = _Joined(first, second)
        data = _concatenated(_inputs(seed, number, 1), _inputs(seed, number, 2))
        whole = _rank(_jacobian(joint, data))
        constrained = _jacobian(first, data[:, :3])  # own outputs and the node: the terms of eq. 31
        own = constrained.reshape(len(data), 3, -1)[:, :2].reshape(2 * len(data), -1)
        alone = _rank(_jacobian(joint, data, only="second"))
        equal += whole == _rank(constrained) + alone
        above += whole > _rank(constrained) + alone
        plain += whole == _rank(own) + alone
        gaps.append(_rank(constrained) + alone - whole)
    return [
        Row(
            "modules joined by a node: N_eff = N_eff(L_1,C) + N_eff(L_2) (eq. 31)",
            "equal",
            f"{equal} of {networks}",
            f"an upper bound (exceeded {above} times), too high by {np.mean(gaps):.2f} on average: the second "
            "module undoes a shift of the node by its biases and a rescaling by its weights, exactly",
        ),
        Row(
            "the same without the constraint: N_eff(L_1) + N_eff(L_2)",
            "too low",
            f"right in {plain} of {networks}",
        ),
    ]


def _links(samples: int, seed: int) -> list[Row]:
    """The log law on networks whose first module has one free direction per link."""
    rows = []
    epsilon = 1e-4
    full = _volume([1.0], epsilon, samples, seed)
    for k in (0.0, 0.1, 0.25, 0.4, 0.5):
        weight = epsilon**k
        volume, wider = (_volume([weight], e, samples, seed) for e in (epsilon, 1.5 * epsilon))
        law = max(0.0, 1 - 2 * float(np.log(weight) / np.log(epsilon)))
        slope = 2 * np.log(wider / volume) / np.log(1.5)
        note = f"as a volume, ln V(w) / ln V(1); the slope 2 d ln V / d ln eps of eq. 9 is {slope:.2f}"
        rows.append(
            Row(
                f"one link w = eps^{k:g}: share of a full link (eq. 34)",
                None,
                float(np.log(volume) / np.log(full)) + 0.0,
                note,
                theory=law,
            )
        )
    for ratio in (2.0, 4.0, 8.0):
        weak, strong = ratio * epsilon**0.5, ratio**2 * epsilon**0.5
        two, one = _volume([weak, weak], epsilon, samples, seed), _volume([strong], epsilon, samples, seed)
        shared = _volume([weak, weak], epsilon, samples, seed, shared=True)
        rows.append(
            Row(
                f"two links of {ratio:g} sqrt(eps) against one of {ratio**2:g} sqrt(eps): ratio of ln V (eq. 35)",
                None,
                float(np.log(two) / np.log(one)),
                f"exactly {1 + np.log(4 / np.pi) / (2 * np.log(ratio)):.3f}: a disc where the law has a square; "
                f"links that are not independent (one input, one neuron): {np.log(shared) / np.log(one):.2f}",
                theory=1.0,
            )
        )
    return rows


def _volume(weights: list[float], epsilon: float, samples: int, seed: int, *, shared: bool = False) -> float:
    """Share of the first module's free parameters in [-1, 1] that keep the behavioural loss below ``epsilon``.

    The first module's nodes are ``v_i = theta_i relu(x_i)``, which none of its own outputs shows; the second module's
    neurons ``relu(w_i v_i + 4)`` read them. ``shared`` feeds all links from one input into one neuron.
    """
    rng = stream(seed, "volume", str(weights), shared)
    x = rng.normal(size=(32, len(weights)))
    if shared:
        x[:] = x[:, :1]
    hidden = np.maximum(x, 0)
    hidden /= np.sqrt((hidden**2).mean(axis=0))  # E v^2 = theta^2, so that w alone is the strength of a link
    inside = 0
    for start in range(0, samples, 50_000):
        theta = rng.uniform(-1, 1, size=(min(50_000, samples - start), 1, len(weights)))
        before = theta * hidden * np.asarray(weights)
        if shared:
            before = before.sum(axis=2, keepdims=True)
        change = np.maximum(before + 4.0, 0) - 4.0
        inside += int(((change**2).mean(axis=1).sum(axis=1) < epsilon).sum())
    return inside / samples


def _module(seed: int, number: int, part: int, *, outputs: int, inputs: int = 3) -> nn.Sequential:
    torch.manual_seed(derive(seed, "module", number, part) % 2**31)
    return nn.Sequential(nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, outputs)).double()


def _inputs(seed: int, number: int, part: int) -> torch.Tensor:
    """Inputs of rank two in three dimensions, so that there are free directions."""
    rng = stream(seed, "module data", number, part)
    return torch.from_numpy(rng.normal(size=(80, 2)) @ rng.normal(size=(2, 3)))


def _concatenated(*data: torch.Tensor) -> torch.Tensor:
    return torch.cat(data, dim=1)


class _SideBySide(nn.Module):
    """Two modules that share nothing: the first reads the first three inputs, the second the others."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both outputs."""
        return torch.cat([self.first(x[..., :3]), self.second(x[..., 3:])], dim=-1)


class _Joined(nn.Module):
    """The second module also reads the last output of the first; the weights of that link are held fixed."""

    def __init__(self, first: nn.Sequential, second: nn.Sequential) -> None:
        super().__init__()
        into, out = second[0], second[2]
        assert isinstance(into, nn.Linear)
        self.first = first
        self.link: torch.Tensor
        self.register_buffer("link", into.weight.detach()[:, 3])
        own = nn.Linear(3, into.out_features).double()
        with torch.no_grad():
            own.weight.copy_(into.weight[:, :3])
            own.bias.copy_(into.bias)
        self.second = nn.ModuleList([own, out])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first module's own outputs, then the second's."""
        first = self.first(x[..., :3])
        hidden = torch.relu(self.second[0](x[..., 3:]) + first[..., 2:] * self.link)
        return torch.cat([first[..., :2], self.second[1](hidden)], dim=-1)


def _jacobian(net: nn.Module, x: torch.Tensor, *, only: str = "") -> FloatArray:
    """Derivatives of all outputs on all data by the parameters (of the part named ``only``)."""
    every = {name: value.detach() for name, value in net.named_parameters()}
    free = {name: value for name, value in every.items() if name.startswith(only)}
    fixed = {name: value for name, value in every.items() if not name.startswith(only)}

    def output(values: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = functional_call(net, {**fixed, **values}, (row,))
        return result

    pieces = vmap(jacrev(output), (None, 0))(free, x)
    flat = [piece.reshape(piece.shape[0] * piece.shape[1], -1) for piece in pieces.values()]
    return np.asarray(torch.cat(flat, dim=1).numpy())


def _rank(jacobian: FloatArray) -> int:
    return int(np.linalg.matrix_rank(jacobian, tol=_RANK * np.linalg.norm(jacobian, 2)))
