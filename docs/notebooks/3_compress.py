# %% [markdown]
# # 5. How much of it is free, and where to cut?
#
# First the theory: how many parameters could move without changing any output on these data? Then the practice: which
# layers to truncate to save a fifth of the parameters, at what measured loss.

# %%
import numpy as np

import strati
from strati import embedded

data = np.load(embedded.path("digits.npz"))
model = strati.as_module(embedded.path("digits-mlp.safetensors"))
count = strati.degeneracy(model, data["x"])
print(count)

# %% [markdown]
# A count, not an estimate: these directions are free to first order. Now measure what truncating costs, and plan.

# %%
found = strati.study(
    model,
    data=(data["x_test"], data["y_test"]),
    interventions=[strati.truncate(rank=[4, 8, 12, 16, 24, 32, 48])],
)
plan = strati.plan(found, budget="parameters=0.8", action="truncate")
print(plan)

# %% [markdown]
# The plan stands beside uniform allocation at the same budget, and says so when it is no better. `strati.apply` (or
# `strati apply PLAN MODEL --out DIR`) writes the network that it makes.

# %%
figure = count.plot()

# %% [markdown]
# **What to take home.** "A fifth of the parameters can go for the loss printed above; this is measured, with its
# interval, not read off a spectrum."
