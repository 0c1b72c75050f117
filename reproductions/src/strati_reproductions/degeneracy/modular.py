"""Section 5 of degeneracy-in-the-loss-landscape as experiments: do free directions add up, and links as logarithms?

5.2.1: free directions of disjoint modules add up. Eqs. 31-32: a module that others read counts with what they read
held fixed, on modules that were made and on modules that were found. Eqs. 34-35: a link of weight ``w`` costs
``1 - 2 ln w / ln eps`` of a full one, so that two weak links cost as much as one strong one. Volumes are counted by
sampling, ranks are those of exact Jacobians.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from strati.core.results import Tick
from strati.core.rng import derive, stream
from strati.landscape.basis.basis import interaction_basis
from strati.landscape.basis.graph import interaction_graph
from strati.landscape.basis.modules import modules
from strati_reproductions.degeneracy.constrained import constrained_loss
from strati_reproductions.degeneracy.surface import interaction_surface, module_parameters
from strati_reproductions.pictures import OURS, THEORY, drawn, panels, save
from strati_reproductions.registry import Reproduction, Row


def section_five(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Free directions of modules, constrained losses, and the log law of links."""
    networks = 10 if quick else 50
    rows = [*_disjoint(networks, seed)]
    tick("disjoint modules")
    rows += _constrained(networks, seed)
    tick("constrained losses")
    rows += _found(networks, seed)
    tick("found modules")
    rows += _links(100_000 if quick else 500_000, seed)
    tick("links")
    figures = drawn(_draw_links, rows, folder)
    captions = {"links": "the share of a full constraint that a link of weight eps^k is worth (eq. 34): counted "
                "volumes on the line 1 - 2k; at k = 1/2 a link is as good as none."}  # fmt: skip
    title = "Modules and degeneracy, section 5"
    return Reproduction("modules-section-5", title, tuple(rows), figures, captions=captions)


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
        inputs = [_inputs(seed, number, part) for part in (1, 2)]
        alone = [constrained_loss(m, x).rank() for m, x in zip(modules, inputs, strict=True)]
        together = constrained_loss(_SideBySide(*modules), _concatenated(*inputs)).rank()
        size = sum(p.numel() for m in modules for p in m.parameters())
        free = [sum(p.numel() for p in m.parameters()) - r for m, r in zip(modules, alone, strict=True)]
        equal += together == sum(alone)
        example = f"e.g. {free[0]} + {free[1]} against {size - together} free together"
    what = "disjoint modules: free directions add up (5.2.1)"
    facts = {"count": equal, "of": networks}
    ours = f"{equal} of {networks}"
    return [Row(what, "always", ours, example, seeds=networks, key="free-add-up", facts=facts)]


def _constrained(networks: int, seed: int) -> list[Row]:
    """``N_eff`` of two modules joined by a node against ``L_2`` plus ``L_1,C`` (eq. 31), the link held fixed."""
    equal = above = plain = 0
    gaps = []
    for number in range(networks):
        first = _module(seed, number, 1, outputs=3)  # two outputs of its own, and the mediating node
        second = _module(seed, number, 2, outputs=2, inputs=4)  # reads the node as its fourth input
        joint = _Joined(first, second)
        x = _concatenated(_inputs(seed, number, 1), _inputs(seed, number, 2))
        joint_rank = constrained_loss(joint, x).rank()
        held = constrained_loss(joint, x, layers="first.*", outputs=(0, 1), nodes=["first:2"])  # eq. 31
        alone = constrained_loss(joint, x, layers="second.*").rank()
        equal += joint_rank == held.rank() + alone
        above += joint_rank > held.rank() + alone
        plain += joint_rank == held.without_nodes().rank() + alone
        gaps.append(held.rank() + alone - joint_rank)
    return [
        Row(
            "modules joined by a node: N_eff = N_eff(L_1,C) + N_eff(L_2) (eq. 31)",
            "equal",
            f"{equal} of {networks}",
            f"an upper bound (exceeded {above} times), too high by {np.mean(gaps):.2f} on average: the second "
            "module undoes a shift of the node by its biases and a rescaling by its weights, exactly",
            seeds=networks,
            key="link-held-fixed",
            facts={"count": equal, "of": networks},
        ),
        Row(
            "the same without the constraint: N_eff(L_1) + N_eff(L_2)",
            "too low",
            f"right in {plain} of {networks}",
            seeds=networks,
        ),
    ]


def _found(networks: int, seed: int) -> list[Row]:
    """Modules that the search itself finds: their surface, and their parameters with and without it."""
    right = more = 0
    weights = []
    for number in range(networks):
        rng = stream(seed, "found modules", number)
        link = float(10 ** rng.uniform(-2, -0.5))
        net = _linked(seed, number, link)
        parts = [rng.normal(size=(12, 2)) for _ in range(2)]
        x = np.array(
            [[*a, *b] for a in parts[0] for b in parts[1]]
        )  # all pairs: nothing correlates by chance
        graph = interaction_graph(interaction_basis(net, x, "neuron"))
        split = modules(graph, epsilon=1e-9, number=2, seed=seed)
        reader = split.labels[2][1]
        surface = interaction_surface(split, 1 - reader, reader)
        right += [(node.layer, node.direction) for node in surface.nodes] == [(1, 0)]
        if surface.nodes:
            weights.append(surface.nodes[0].weight / link - 1)
        parameters = module_parameters(split, 1 - reader)
        more += parameters.effective > parameters.unconstrained
    return [
        Row(
            "modules found by the search: the interaction surface is the neuron that is read",
            None,
            f"{right} of {networks}",
            "two halves of an MLP joined by one weight of 0.01 to 0.3, which is recovered within "
            f"{max(map(abs, weights)):.1e} of its size",
            seeds=networks,
        ),
        Row(
            "modules found by the search: holding the surface costs freedom (eq. 31)",
            "always",
            f"{more} of {networks}",
            "N_eff of the module that is read, with and without its surface held in place",
            seeds=networks,
        ),
    ]


def _linked(seed: int, number: int, link: float) -> nn.Sequential:
    """An MLP of two halves 2-3-1 whose second output reads the first hidden neuron by one weight."""
    torch.manual_seed(derive(seed, "linked", number) % 2**31)
    into, outward = nn.Linear(4, 6).double(), nn.Linear(6, 2).double()
    with torch.no_grad():
        for layer, (rows, columns) in ((into, (3, 2)), (outward, (1, 3))):
            layer.weight[:rows, columns:] = 0.0
            layer.weight[rows:, :columns] = 0.0
        outward.weight[1, 0] = link
        into.bias.add_(1.0)
    return nn.Sequential(into, nn.ReLU(), outward)


def _links(samples: int, seed: int) -> list[Row]:
    """The log law on networks whose first module has one free direction per link."""
    rows = []
    epsilon = 1e-4
    full = _volume([1.0], epsilon, samples, seed)
    for k in (0.0, 0.1, 0.25, 0.4, 0.5):
        weight = epsilon**k
        volume, wider = (_volume([weight], e, samples, seed) for e in (epsilon, 1.5 * epsilon))
        law = round(max(0.0, 1 - 2 * float(np.log(weight) / np.log(epsilon))), 12)
        slope = 2 * np.log(wider / volume) / np.log(1.5)
        note = f"as a volume, ln V(w) / ln V(1); the slope 2 d ln V / d ln eps of eq. 9 is {slope:.2f}"
        rows.append(
            Row(
                f"one link w = eps^{k:g}: share of a full link (eq. 34)",
                None,
                float(np.log(volume) / np.log(full)) + 0.0,
                note,
                theory=law,
                error=_ratio_error(volume, full, samples),
            )
        )
    for ratio in (2.0, 4.0, 8.0):
        weak, strong = ratio * epsilon**0.5, ratio**2 * epsilon**0.5
        double, single = (
            _volume([weak, weak], epsilon, samples, seed),
            _volume([strong], epsilon, samples, seed),
        )
        shared = _volume([weak, weak], epsilon, samples, seed, shared=True)
        rows.append(
            Row(
                f"two links of {ratio:g} sqrt(eps) against one of {ratio**2:g} sqrt(eps): ratio of ln V (eq. 35)",
                None,
                float(np.log(double) / np.log(single)),
                f"exactly {1 + np.log(4 / np.pi) / (2 * np.log(ratio)):.3f}: a disc where the law has a square; "
                f"links that are not independent (one input, one neuron): {np.log(shared) / np.log(single):.2f}",
                theory=1.0,
                error=_ratio_error(double, single, samples),
            )
        )
    return rows


def _ratio_error(volume: float, full: float, samples: int) -> float:
    """Standard error of ``ln V / ln V_full``, each volume counted in ``samples`` samples."""
    variance, full_variance = ((1 - v) / (v * samples) for v in (volume, full))
    log, base = np.log(volume), np.log(full)
    return float(np.sqrt(variance / base**2 + full_variance * (log / base**2) ** 2))


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


def _concatenated(*inputs: torch.Tensor) -> torch.Tensor:
    return torch.cat(inputs, dim=1)


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
        into, outward = second[0], second[2]
        assert isinstance(into, nn.Linear)
        self.first = first
        self.link: torch.Tensor
        self.register_buffer("link", into.weight.detach()[:, 3])
        reader = nn.Linear(3, into.out_features).double()
        with torch.no_grad():
            reader.weight.copy_(into.weight[:, :3])
            reader.bias.copy_(into.bias)
        self.second = nn.ModuleList([reader, outward])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first module's own outputs, then the second's."""
        first = self.first(x[..., :3])
        hidden = torch.relu(self.second[0](x[..., 3:]) + first[..., 2:] * self.link)
        return torch.cat([first[..., :2], self.second[1](hidden)], dim=-1)
