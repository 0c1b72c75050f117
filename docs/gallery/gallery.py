# %% [markdown]
# # Gallery
#
# This page shows every figure that strati draws with matplotlib, with the code that draws it. The examples use the
# digits that come with the package, so you can run them as they are. `figure.savefig("name.pdf")` writes vector
# graphics. The [HTML report](../report.md) shows the same results interactively.

# %%
import tempfile
from pathlib import Path

import numpy as np

import strati
from strati import embedded

model = strati.as_module(embedded.path("digits-mlp.safetensors"))
first = strati.as_module(embedded.path("digits-mlp-init.safetensors"))
data = np.load(embedded.path("digits.npz"))
x, y = data["x_test"], data["y_test"]

# %% [markdown]
# ## Spectra
#
# One layer: the density of its eigenvalues with the random bulk and the power-law tail, and the eigenvalues by rank.

# %%
figure = strati.scan(model)["0"].plot()

# %% [markdown]
# A whole network: what stands out where.

# %%
figure = strati.scan(model).plot()

# %% [markdown]
# A result without a picture of its own draws its table: here the shapes of the layers.

# %%
figure = strati.inspect(embedded.path("digits-mlp.safetensors")).plot()

# %% [markdown]
# ## Two networks, and a series of them
#
# Before and after training, layer by layer.

# %%
figure = strati.compare(first, model).plot()

# %% [markdown]
# Several checkpoints in order: the course of each layer, and where it leaves the random-like phase. Here weights on the
# straight way from the first to the last, which stand in for checkpoints.

# %%
start, end = first.state_dict(), model.state_dict()
steps = [{k: start[k] + t * (end[k] - start[k]) for k in end} for t in np.linspace(0, 1, 6)]
figure = strati.compare(*steps, series=True).plot()

# %% [markdown]
# The same as a run over time, with changes of course and their intervals where there are any.

# %%
figure = strati.track(steps, steps=[0, 20, 40, 60, 80, 100]).plot()

# %% [markdown]
# ## Interventions
#
# What each layer's metric says against what the network loses when that layer is changed.

# %%
study = strati.study(
    model,
    data=(x, y),
    initial=first,
    interventions=["reinitialise", "rerandomise", strati.truncate(rank=[4, 16])],
)
figure = study.plot(metric="stable_rank")

# %% [markdown]
# The same for an audit of the study, and for several metrics at once.

# %%
figure = strati.audit(study).plot(metric="frobenius_norm")

# %%
figure = study.plot(metric=["alpha", "stable_rank", "frobenius_norm", "activation_disagreement"])

# %% [markdown]
# ## Loss landscape
#
# Used and free directions of each layer.

# %%
figure = strati.degeneracy(model, x[:100]).plot()

# %% [markdown]
# A learning coefficient: the chains, and the estimate as draws come in. Here of a small network on made data.

# %%
import torch
from torch import nn

torch.manual_seed(0)
small = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
points = torch.randn(60, 2, dtype=torch.float64)
options = {"chains": 4, "draws": 100, "warmup": 40, "nbeta": 10.0, "seed": 0}
figure = strati.llc(small, "behavioural-mse", points, **options).plot()

# %% [markdown]
# Of each layer in turn, the others held fixed.

# %%
figure = strati.llc(small, "behavioural-mse", points, per_layer=True, **options).plot()

# %% [markdown]
# How many parameters count at which tolerated loss.

# %%
figure = strati.effective_parameters(small, points, scales=[1e-3, 1e-2, 1e-1], draws=100, seed=0).plot()

# %% [markdown]
# ## Interactions
#
# Eigenvalues of the interaction basis, layer by layer; the graph of interactions; the graph with its modules.

# %%
basis = strati.interaction_basis(model, x[:200])
figure = basis.plot()

# %%
graph = strati.interaction_graph(basis)
figure = graph.plot()

# %%
figure = strati.modules(graph).plot()

# %% [markdown]
# Bases beside each other: how much of the strength the strongest edges carry, and what is left of the accuracy when
# only the strongest directions are kept.

# %%
from strati.landscape.basis.ablation import compare_bases
from strati.report.plots.landscape import plot_ablation, plot_strengths

beside = compare_bases(model, x[:200], labels=y[:200])
figure = plot_strengths(beside.graphs)

# %%
figure = plot_ablation(beside.ablation)

# %% [markdown]
# ## Reassembly
#
# A residual network in pieces, put back: scores of all pairs, and the order as it emerges.

# %%
from strati.reassembly.residual.make import Recipe, make
from strati.reassembly.residual.pieces import read_pieces

folder = Path(tempfile.mkdtemp())
make(folder, Recipe(blocks=6, epochs=4, rows=600, seed=0))
table = np.loadtxt(folder / "data.csv", delimiter=",", skiprows=1)
inputs, outputs = table[:, :24], table[:, 24:25]
reassembly = strati.reassemble(read_pieces(folder), inputs, outputs)
figure = reassembly.plot()

# %% [markdown]
# ## More pictures of spectra and data
#
# The tail exponent over every possible start of the tail, with its error.

# %%
figure = strati.scan(model)["2"].plot("alpha")

# %% [markdown]
# The influence of rows of data on each other: covariances of their losses near the trained weights.

# %%
options = {"nbeta": 50.0, "gamma": 10.0, "chains": 4, "draws": 100, "warmup": 100, "seed": 0}
figure = strati.influence(small, "behavioural-mse", points[:20], **options).plot()
