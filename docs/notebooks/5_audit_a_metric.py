# %% [markdown]
# # 5. Audit a metric of your own
#
# You have an idea for a metric of a weight matrix. Does it predict how much the network suffers when the layer is
# changed? `study` measures the damage, `audit` tests your metric against it, next to the built-in ones.

# %%
import numpy as np

import strati
from strati import embedded

digits = np.load(embedded.path("digits.npz"))
network = strati.as_module(embedded.path("digits-mlp.safetensors"))


def kurtosis(matrix):
    """The fourth moment of the entries: large if a few weights dominate."""
    entries = (matrix - matrix.mean()) / matrix.std()
    return float((entries**4).mean())


def lost_energy(intact, changed):
    """The share of the squared norm that the intervention removed."""
    return float(((intact - changed) ** 2).sum() / (intact**2).sum())


measured = strati.study(
    network,
    data=(digits["x_test"], digits["y_test"]),
    initial=strati.as_module(embedded.path("digits-mlp-init.safetensors")),
    interventions=[
        "reinitialise",
        "rerandomise",
        strati.truncate(rank=[1, 2, 4, 8, 16]),
        strati.quantise(bits=[4, 3, 2]),
        strati.prune(share=[0.5, 0.8, 0.95]),
    ],
    draws=3,
    plugins={"kurtosis": kurtosis, "lost_energy": lost_energy},
)
measured.frame().groupby(["intervention", "layer"])["performance"].mean().unstack().round(2)

# %% [markdown]
# A metric is any function of the matrix, or of the intact and the changed matrix. The study recorded it for every layer
# and every intervention. Now ask the audit:

# %%
verdicts = {v.metric: v for v in strati.audit(measured).verdicts if v.intervention is None}
for name in ("kurtosis", "lost_energy", "alpha", "stable_rank", "activation_error"):
    print(f"{name:18} {verdicts[name].recommendation}")

# %%
print(verdicts["lost_energy"].text)

# %% [markdown]
# The audit corrects for the number of metrics tested, and it says `unknown` if the data cannot decide. With only three
# layers it can judge metrics that compare the intact with the changed matrix; metrics of a single matrix need studies of
# more networks (see the page of [audit](../audit.md)).

# %%
figure = measured.plot(metric="lost_energy")

# %% [markdown]
# **Conclusion.** Test a metric before you rely on it. A metric of your own needs one line, `plugins={...}`, and is judged
# by the same rules as the built-in ones.
