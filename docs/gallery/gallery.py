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
# The figure of one layer shows the density of its eigenvalues with the random bulk and the power-law tail, and the
# eigenvalues by rank.

# %%
figure = strati.scan(model)["0"].plot()

# %% [markdown]
# The figure of a whole network shows the main numbers of every layer.

# %%
figure = strati.scan(model).plot()

# %% [markdown]
# A result that has no figure of its own draws its table. This one shows the shapes of the layers.

# %%
figure = strati.inspect(embedded.path("digits-mlp.safetensors")).plot()

# %% [markdown]
# ## Two networks, and a series of them
#
# `compare` shows each layer before and after training.

# %%
figure = strati.compare(first, model).plot()

# %% [markdown]
# With several checkpoints in order, the figure shows each layer over training and where it stops being random-like.
# In this example the checkpoints are points on the straight line from the first to the last weights.

# %%
start, end = first.state_dict(), model.state_dict()
steps = [{k: start[k] + t * (end[k] - start[k]) for k in end} for t in np.linspace(0, 1, 6)]
figure = strati.compare(*steps, series=True).plot()

# %% [markdown]
# `track` shows the same over the steps of training, with change points and their intervals if there are any.

# %%
figure = strati.track(steps, steps=[0, 20, 40, 60, 80, 100]).plot()

# %% [markdown]
# ## Interventions
#
# The figure of a study shows the performance after each change of a layer against a metric of the layer.

# %%
study = strati.study(
    model,
    data=(x, y),
    initial=first,
    interventions=["reinitialise", "rerandomise", strati.truncate(rank=[4, 16])],
)
figure = study.plot(metric="stable_rank")

# %% [markdown]
# An audit of the study has the same figure, also for several metrics at once.

# %%
figure = strati.audit(study).plot(metric="frobenius_norm")

# %%
figure = study.plot(metric=["alpha", "stable_rank", "frobenius_norm", "activation_disagreement"])

# %% [markdown]
# ## Loss landscape
#
# `degeneracy` shows the used and free directions of each layer.

# %%
figure = strati.degeneracy(model, x[:100]).plot()

# %% [markdown]
# The figure of a learning coefficient shows the chains, and the estimate over the number of draws. The example is a
# small network on synthetic data.

# %%
import torch
from torch import nn

torch.manual_seed(0)
small = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
points = torch.randn(60, 2, dtype=torch.float64)
options = {"chains": 4, "draws": 100, "warmup": 40, "nbeta": 10.0, "seed": 0}
figure = strati.llc(small, "behavioural-mse", points, **options).plot()

# %% [markdown]
# With `per_layer=True`, each layer varies in turn while the others are held fixed.

# %%
figure = strati.llc(small, "behavioural-mse", points, per_layer=True, **options).plot()

# %% [markdown]
# `effective_parameters` shows how many parameters are used at each tolerated loss.

# %%
figure = strati.effective_parameters(small, points, scales=[1e-3, 1e-2, 1e-1], draws=100, seed=0).plot()

# %% [markdown]
# ## Interactions
#
# These figures show the eigenvalues of the interaction basis in each layer, the graph of interactions, and the graph
# with its modules.

# %%
basis = strati.interaction_basis(model, x[:200])
figure = basis.plot()

# %%
graph = strati.interaction_graph(basis)
figure = graph.plot()

# %%
figure = strati.modules(graph).plot()

# %% [markdown]
# These figures compare bases. They show how much of the strength the strongest edges carry, and how much accuracy is
# left if only the strongest directions are kept.

# %%
from strati.landscape.basis.ablation import compare_bases
from strati.report.plots.landscape import plot_ablation, plot_strengths

comparison = compare_bases(model, x[:200], labels=y[:200])
figure = plot_strengths(comparison.graphs)

# %%
figure = plot_ablation(comparison.ablation)

# %% [markdown]
# ## Reassembly
#
# `reassemble` puts the pieces of a residual network back. The figure shows the scores of all pairs, and the order at
# each stage.

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
# This figure shows the tail exponent with its error for every possible start of the tail.

# %%
figure = strati.scan(model)["2"].plot("alpha")

# %% [markdown]
# `influence` shows how rows of data influence each other: the covariances of their losses near the trained weights.

# %%
options = {"nbeta": 50.0, "gamma": 10.0, "chains": 4, "draws": 100, "warmup": 100, "seed": 0}
figure = strati.influence(small, "behavioural-mse", points[:20], **options).plot()
