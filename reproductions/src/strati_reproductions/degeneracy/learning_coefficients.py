"""degeneracy-in-the-loss-landscape, sections 2.2, 3.1.1 and 6.1, and the table of known learning coefficients.

``truth_table`` compares the sampler with exact values; ``studies`` tests four statements of the paper on small real
networks: the behavioural loss has no lower coefficient than the training loss, a loss scale from the spread
between seeds, weight decay empties null directions, and how good the factorised Hessian is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from strati.core.errors import UnsupportedError
from strati.core.results import Tick, silent
from strati.core.rng import derive
from strati.landscape.llc.llc import LLCConfig, learning_coefficient, llc
from strati.landscape.llc.scales import closed_form, effective_parameters, seed_scale
from strati.landscape.objective import behavioural_loss, exact_hessian
from strati_reproductions.llc_cases.known import (
    Known,
    deep_linear,
    independent,
    monomial,
    regular,
    sum_of_powers,
)
from strati_reproductions.pictures import OURS, THEORY, drawn, panels, save
from strati_reproductions.registry import Reproduction, Row

_DECAY = 0.3
_PLAIN_DECAY = 0.01  # of SGD, whose decay acts through the rate and the momentum
_NEAR = 100.0  # localisation at which the chains of a trained network mix: a tenth of the size of a weight

Case = tuple[str, Callable[[Tensor], Tensor], Tensor, Known]


def cases() -> list[Case]:
    """Losses whose coefficient is known, with the point and the value."""
    plain: list[tuple[str, Callable[[Tensor], Tensor], int, Known]] = [
        ("w1^2 + w2^2", lambda w: (w**2).sum(), 2, regular(2)),
        ("3 squares of scales 1e-2, 1, 1e2 in 5 dimensions", _squares, 5, regular(3)),
        ("w1^2 w2^2", lambda w: (w[0] * w[1]) ** 2, 2, monomial([2, 2])),
        ("w1^2 w2^2 w3^2", lambda w: (w[0] * w[1] * w[2]) ** 2, 3, monomial([2, 2, 2])),
        ("w1^2 w2^4", lambda w: w[0] ** 2 * w[1] ** 4, 2, monomial([2, 4])),
        ("w1^4 w2^4", lambda w: (w[0] * w[1]) ** 4, 2, monomial([4, 4])),
        ("w1^2 + w2^4", lambda w: w[0] ** 2 + w[1] ** 4, 2, sum_of_powers([2, 4])),
        ("w1^4 + w2^4 + w3^6", lambda w: w[0] ** 4 + w[1] ** 4 + w[2] ** 6, 3, sum_of_powers([4, 4, 6])),
        ("(w1^2 + w2^2)^2", lambda w: (w**2).sum() ** 2, 2, sum_of_powers([4, 4])),
        (
            "w1^2 w2^2 + w3^2",
            lambda w: (w[0] * w[1]) ** 2 + w[2] ** 2,
            3,
            independent(monomial([2, 2]), regular(1)),
        ),
    ]
    rows = [(name, f, torch.zeros(size, dtype=torch.float64), exact) for name, f, size, exact in plain]
    shapes = [((5, 3, 5), 0), ((5, 3, 5), 1), ((6, 2, 6), 0), ((3, 8, 4), 2), ((4, 4, 4, 4), 1)]
    shapes += [((7, 4, 3), 2), ((6, 4, 5, 3), 1), ((2, 2, 2, 2), 0), ((10, 10, 10, 10, 10), 3)]
    for widths, rank in shapes:
        potential, theta = deep_linear_case(widths, rank)
        name = f"deep linear {'-'.join(map(str, widths))}, rank {rank}"
        rows.append((name, potential, theta, deep_linear(widths, rank)))
    return rows


def deep_linear_case(
    widths: Sequence[int], rank: int, seed: int = 0
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The squared error of a deep linear network against itself, at layers of just this rank."""
    generator = torch.Generator().manual_seed(derive(seed, "deep linear", *widths, rank))
    shapes = list(zip(widths[1:], widths[:-1], strict=True))

    def layer(rows: int, columns: int) -> Tensor:
        left = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
        right = torch.randn(rank, columns, generator=generator, dtype=torch.float64)
        matrix: Tensor = left @ right / max(1.0, (rank * columns) ** 0.5)
        return matrix

    theta = torch.cat([layer(*s).reshape(-1) for s in shapes])

    def product(t: Tensor) -> Tensor:
        parts = torch.split(t, [a * b for a, b in shapes])
        matrix = parts[0].reshape(shapes[0])
        for part, shape in zip(parts[1:], shapes[1:], strict=True):
            matrix = part.reshape(shape) @ matrix
        return matrix

    target = product(theta)
    return lambda t: ((product(t) - target) ** 2).sum(), theta


def truth_table(*, quick: bool, seed: int, folder: Path, tick: Tick = silent) -> Reproduction:
    """Every known case at default settings; ``quick`` leaves out the deep linear networks."""
    rows, errors = [], []
    for name, potential, theta, truth in cases():
        if quick and name.startswith("deep"):
            continue
        sampled = learning_coefficient(potential, theta, seed=seed)
        exact = float(truth.value)
        note = (
            sampled.reason
            or f"at nbeta 1e4: {sampled.estimate:.4f} +- {sampled.stderr:.4f}; m = {truth.multiplicity}"
        )
        if sampled.asymptotic is not None:
            errors.append(abs(sampled.asymptotic / exact - 1))
            note = f"{100 * errors[-1]:.1f} % off; {note}"
        error = sampled.asymptotic_stderr
        rows.append(Row(f"lambda of {name}", None, sampled.asymptotic, note, theory=exact, error=error))
        tick(name)
    rows.append(Row("median relative error", None, float(np.median(errors)), "goal: at most 0.03"))
    rows.append(Row("largest relative error", None, float(np.max(errors)), "goal: at most 0.10"))
    title = "Learning coefficients: exact and sampled (limit for large nbeta)"
    captions = {"truth-table": "sampled learning coefficients against the exact ones, with two errors. Right values "
                "lie on the line."}  # fmt: skip
    figures = drawn(_draw_truth, rows, folder, title)
    return Reproduction("llc-truth-table", title, tuple(rows), figures, captions=captions)


def _draw_truth(rows: list[Row], folder: Path, title: str) -> tuple[str, ...]:
    """Sampled against exact, with two errors; on the diagonal where it is right."""
    compared = [r for r in rows if isinstance(r.theory, float) and isinstance(r.ours, float)]
    figure, (axis,) = panels(1, title=title, size=(5.0, 4.2))
    exact, ours = (
        [float(v) for v in column] for column in zip(*((r.theory, r.ours) for r in compared), strict=True)
    )
    ends = [0.8 * min(exact), 1.25 * max(exact)]
    axis.plot(ends, ends, color=THEORY, label="exact")
    axis.errorbar(
        exact, ours, yerr=[2 * (r.error or 0.0) for r in compared], fmt="o", ms=4, color=OURS, label="sampled"
    )
    axis.set(xscale="log", yscale="log", xlabel="exact", ylabel="sampled, +- 2 errors")
    axis.legend(frameon=False)
    return save(figure, folder, "truth-table")


def studies(*, quick: bool, seed: int, folder: Path, tick: Tick = silent) -> Reproduction:
    """Four statements of the paper, each on small networks trained here."""
    rows = [*_behavioural_above_training(seed, tick), *_scale_from_seeds(seed, tick)]
    rows += [*_weight_decay(seed, 2 if quick else 6, tick), *_factorised(seed, 2 if quick else 8, tick)]
    captions = {
        "weight-decay": "share of the first layer's squared weights in directions that no datum has, without and with "
        "weight decay (3.1.1): decay empties them.",
        "factorised-hessian": "how far the factorised Hessian of eq. 37 is from the exact one, and its largest "
        "eigenvalue and learning coefficient as ratios (6.1): 0, 0, 1 and 1 were it exact.",
    }
    title = "Degeneracy in the loss landscape: statements tested"
    figures = drawn(_draw_studies, rows, folder)
    return Reproduction("degeneracy-landscape", title, tuple(rows), figures, captions=captions)


def _draw_studies(rows: list[Row], folder: Path) -> tuple[str, ...]:
    paths: list[str] = []
    for start, stem, title, label in (
        ("3.1.1 share of ||W1||^2 in null directions, ", "weight-decay", "3.1.1: weight decay", "share"),
        (
            "6.1 ",
            "factorised-hessian",
            "6.1: the factorised Hessian",
            "relative error, or ratio to the exact one",
        ),
    ):
        shown_rows = [row for row in rows if row.what.startswith(start)]
        figure, (axis,) = panels(1, title=title, size=(6.4, 0.9 + 0.32 * len(shown_rows)))
        names = [row.what.removeprefix(start) for row in shown_rows]
        errors = [2 * (row.error or 0.0) for row in shown_rows]
        axis.barh(
            names, [float(row.ours or 0.0) for row in shown_rows], xerr=errors, color=OURS, ecolor=THEORY
        )
        axis.invert_yaxis()
        axis.set_xlabel(label)
        paths += save(figure, folder, stem)
    return tuple(paths)


def _behavioural_above_training(seed: int, tick: Tick) -> list[Row]:
    """Section 2.2.1: three data points, a line: two parameters matter to behaviour, and to an exact fit the same."""
    x = torch.tensor([[-1.0], [0.5], [1.0]])
    generator = torch.Generator().manual_seed(derive(seed, "2.2.1"))
    first, second = nn.Linear(1, 2, bias=False).double(), nn.Linear(2, 1, bias=False).double()
    model = nn.Sequential(first, second)
    for layer in (first, second):
        layer.weight.data = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
    slope = float((second.weight @ first.weight).detach())
    noise = torch.tensor(
        [[1.0], [0.0], [1.0]], dtype=torch.float64
    )  # orthogonal to x: the fit stays the best one
    settings = LLCConfig(seed=seed, nbeta=1e3)
    behaviour = llc(model, "behavioural-mse", x, config=settings)
    training = llc(model, "mse", (x, slope * x.double() + noise), config=settings)
    tick("2.2.1")
    note = "two linear layers 1-2-1 at the least-squares fit of noisy data"
    rows = [
        Row(
            "2.2.1 lambda of the training loss",
            None,
            training.asymptotic,
            note,
            error=training.asymptotic_stderr,
            key="lambda-training",
        ),
        Row(
            "2.2.1 lambda of the behavioural loss",
            None,
            behaviour.asymptotic,
            "the paper: never below the former",
            error=behaviour.asymptotic_stderr,
            key="lambda-behavioural",
        ),
    ]
    labels = torch.tensor([0, 1, 0])
    flat = nn.Linear(1, 2).double()
    for parameter in flat.parameters():
        parameter.data.zero_()
    logit = llc(flat, "behavioural-mse", x, config=settings)
    averaged = llc(flat, _mean_label_loss, (x, labels), config=settings)
    tick("2.2.1 b")
    what = "a loss that sees only the mean output; behaviour sees slope and offset of both outputs"
    rows.append(
        Row("2.2.1 lambda of a blind training loss", None, averaged.asymptotic, what, theory=0.5,
            error=averaged.asymptotic_stderr)
    )  # fmt: skip
    rows.append(
        Row(
            "2.2.1 lambda of the behavioural loss, same network",
            None,
            logit.asymptotic,
            "4 parameters / 2",
            theory=2.0,
            error=logit.asymptotic_stderr,
        )
    )
    return rows


def _scale_from_seeds(seed: int, tick: Tick) -> list[Row]:
    """Section 2.2.2: three trainings of one task; their spread as the scale, N_eff there and far above."""
    x = torch.linspace(-2, 2, 40)[:, None].double()
    models = [_trained(x, torch.sin(2 * x), (1, 5, 1), derive(seed, "2.2.2", s)) for s in range(3)]
    with torch.no_grad():
        epsilon = seed_scale([m(x) for m in models])
    curve = effective_parameters(models[0], x, scales=[epsilon, 1e2 * epsilon], gamma=_NEAR, seed=seed)
    tick("2.2.2")
    rows = [
        Row(
            "2.2.2 eps: variance between three seeds",
            None,
            epsilon,
            f"tanh 1-5-1 on sin(2x), 16 parameters, gamma {_NEAR:g}",
            seeds=3,
        )
    ]
    for row in curve.rows:
        note = f"Gauss-Newton {2 * (row.gauss_newton or 0):.4g}"
        error = None if row.stderr is None else 2 * row.stderr
        what = f"2.2.2 N_eff at eps = {row.epsilon:.3g}"
        rows.append(Row(what, None, row.effective, row.reason or note, error=error))
    return rows


def _weight_decay(seed: int, networks: int, tick: Tick) -> list[Row]:
    """Section 3.1.1: inputs on a subspace; the share of the first weight's norm that the data never see.

    By plain gradients too: Adam scales coordinates one by one, which turns gradients into directions that no datum has.
    """
    rows = []
    for name, decays in (("SGD", (0.0, _PLAIN_DECAY)), ("AdamW", (0.0, _DECAY))):
        for decay in decays:
            shares = [_hidden_share(derive(seed, "3.1.1", s), name, decay) for s in range(networks)]
            tick(f"3.1.1 {name} decay {decay}")
            what = f"3.1.1 share of ||W1||^2 in null directions, {name}, decay {decay:g}"
            row = _mean(what, shares, "inputs span 4 of 8", paper="near 0" if decay else None)
            rows.append(replace(row, key="null-share", facts={"optimiser": name, "decay": decay}))
    return rows


def _hidden_share(seed: int, optimiser: str, decay: float) -> float:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    x = torch.randn(200, 4, generator=generator, dtype=torch.float64) @ basis[:4]
    y = torch.sin(x.sum(1, keepdim=True))
    model = _trained(x, y, (8, 12, 1), seed, decay=decay, optimiser=optimiser)
    weight = next(model.parameters()).detach()
    return float((weight @ basis[4:].T).norm() ** 2 / weight.norm() ** 2)


def _factorised(seed: int, networks: int, tick: Tick) -> list[Row]:
    """Section 6.1: eq. 37 against the exact Hessian of trained networks."""
    error, blocks, ratio, gap = [], [], [], []
    for s in range(networks):
        generator = torch.Generator().manual_seed(derive(seed, "6.1", s))
        x = torch.randn(100, 3, generator=generator, dtype=torch.float64)
        model = _trained(x, torch.sin(x.sum(1, keepdim=True)), (3, 6, 4, 1), derive(seed, "6.1", s))
        loss = behavioural_loss(model, x)
        exact, approximate = exact_hessian(loss, loss.flat.theta), factorised_hessian(model, x)
        inside = torch.block_diag(*(torch.ones(n, n, dtype=torch.bool) for n in _layer_sizes(model)))
        error.append(float((exact - approximate).norm() / exact.norm()))
        blocks.append(float(((exact - approximate) * inside).norm() / (exact * inside).norm()))
        values = [torch.linalg.eigvalsh(m).clamp(min=0).numpy() for m in (exact, approximate)]
        ratio.append(float(values[1].max() / values[0].max()))
        gap.append(closed_form(values[1], 1e3, 1.0) / closed_form(values[0], 1e3, 1.0))
        tick("6.1")
    what = f"{networks} tanh networks 3-6-4-1, relative Frobenius norm"
    return [
        _mean("6.1 eq. 37 against the exact Hessian, all blocks", error, what),
        _mean("6.1 the same, within layers only", blocks, "first presumption alone"),
        _mean("6.1 largest eigenvalue, factorised / exact", ratio, "1 were it exact"),
        _mean("6.1 lambda at nbeta 1e3, factorised / exact", gap, "closed form; gamma = 1"),
    ]


def _mean(what: str, values: list[float], note: str, paper: str | None = None) -> Row:
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    return Row(what, paper, float(np.mean(values)), note, error=error, seeds=len(values))


def _trained(
    x: Tensor, y: Tensor, widths: Sequence[int], seed: int, *, decay: float = 0.0, optimiser: str = "AdamW"
) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    stages: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layer = nn.Linear(inputs, outputs).double()
        bound = inputs**-0.5
        for parameter in layer.parameters():
            parameter.data.uniform_(-bound, bound, generator=generator)
        stages += [layer, nn.Tanh()]
    model = nn.Sequential(*stages[:-1])
    weights = model.parameters()
    stepper: torch.optim.Optimizer
    if optimiser == "AdamW":
        stepper = torch.optim.AdamW(weights, lr=1e-2, weight_decay=decay)
    else:
        stepper = torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=decay)
    for _ in range(1500):
        stepper.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        stepper.step()
    return model


def _layer_sizes(model: nn.Sequential) -> list[int]:
    return [sum(p.numel() for p in stage.parameters()) for stage in model if isinstance(stage, nn.Linear)]


def _mean_label_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean() ** 2 + 0 * target.sum()


def _squares(w: Tensor) -> Tensor:
    return 1e-4 * w[0] ** 2 + w[1] ** 2 + 1e4 * w[2] ** 2 + 0 * w.sum()


def factorised_hessian(model: nn.Sequential, x: Tensor) -> Tensor:
    """Eq. 37: the Hessian of the behavioural loss as one Kronecker product per layer, nothing between layers.

    Block ``l`` is ``2 K^l (x) G^l`` with ``G`` the Gram matrix of the layer's inputs (bias folded in) and ``K`` that
    of the output's Jacobians with respect to its preactivations.

    Args:
        model: Linear layers with biases and elementwise activations in sequence.
        x: Inputs.

    Returns:
        ``(N, N)``, parameters ordered as in :class:`~strati.landscape.objective.FlatModel`.

    Raises:
        UnsupportedError: The module is not such a sequence.
    """
    stages = list(model)
    linears = [i for i, s in enumerate(stages) if isinstance(s, nn.Linear)]
    if not linears or any(stages[i].bias is None for i in linears):
        raise UnsupportedError(
            "model", "the factorised Hessian needs a Sequential of Linear layers with biases"
        )
    blocks = []
    inputs = x
    for position, stage in enumerate(stages):
        if isinstance(stage, nn.Linear):
            with torch.no_grad():
                before = stage(inputs)
            rest = nn.Sequential(*stages[position + 1 :])
            jacobian = vmap(jacrev(lambda p, rest=rest: rest(p[None])[0]))(before).detach()
            folded = torch.cat([inputs, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
            gram = folded.T @ folded / len(x)
            back = torch.einsum("nki,nkj->ij", jacobian, jacobian) / len(x)
            blocks.append(_reordered(2 * torch.kron(back, gram), stage.in_features, stage.out_features))
        with torch.no_grad():
            inputs = stage(inputs)
    matrix: Tensor = torch.block_diag(*blocks)
    return matrix


def _reordered(block: Tensor, inputs: int, outputs: int) -> Tensor:
    """From (output, input with bias last) to all weights first, then the biases."""
    index = torch.arange(outputs * (inputs + 1)).reshape(outputs, inputs + 1)
    order = torch.cat([index[:, :inputs].reshape(-1), index[:, inputs]])
    return block[order][:, order]
