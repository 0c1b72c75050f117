# %% [markdown]
# # 4. Learning coefficient and curvature over training
#
# How many parameters does a network use, and how does this change during training? We train a small network on the
# embedded digits, keep five checkpoints, and estimate the local learning coefficient and the curvature of each.

# %%
import copy
import tempfile

import numpy as np
import torch

import strati
from strati import embedded

torch.manual_seed(0)
torch.set_num_threads(1)
digits = np.load(embedded.path("digits.npz"))
x, y = torch.tensor(digits["x"][:400]).float(), torch.tensor(digits["y"][:400]).long()
network = torch.nn.Sequential(torch.nn.Linear(64, 7), torch.nn.Tanh(), torch.nn.Linear(7, 10))
optimiser = torch.optim.Adam(network.parameters(), lr=5e-3)
checkpoints = {}
for step in range(1025):
    if step in (64, 128, 256, 512, 1024):
        checkpoints[step] = copy.deepcopy(network)
    optimiser.zero_grad()
    torch.nn.functional.cross_entropy(network(x), y).backward()
    optimiser.step()

# %% [markdown]
# `track` measures all checkpoints with the same data, temperature and localisation, so that the values can be compared.
# The behavioural loss compares the outputs with those of the checkpoint itself. It has its minimum at every checkpoint.

# %%
with tempfile.TemporaryDirectory() as folder:
    run = strati.track(
        list(checkpoints.values()),
        steps=list(checkpoints),
        data=(x, y),
        what="loss,llc",
        loss="behavioural-kl",
        chains=4,
        draws=300,
        out=folder,
    )
llc = run.series.query("what == 'llc'").set_index("step")[["value", "stderr"]]
llc.round(1)

# %% [markdown]
# The network has 535 parameters, so an ordinary minimum would have a coefficient of 267.5. The coefficient is much
# smaller. After the first steps it falls while the network trains. Each value has a standard error.
#
# The curvature of the training loss falls as well. `trace` is the sum of the eigenvalues of the Hessian. For
# networks of this size it is exact.

# %%
for step, checkpoint in checkpoints.items():
    curvature = strati.curvature(checkpoint, "cross_entropy", (x, y), top=2, seed=0)
    print(f"step {step:5}: trace {curvature.trace:6.2f}, largest eigenvalues", np.round(curvature.top, 2))

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(6, 3.2))
axis.errorbar(llc.index, llc["value"], yerr=2 * llc["stderr"], marker="o")
axis.set(xscale="log", xlabel="step", ylabel="learning coefficient")
figure.tight_layout()

# %% [markdown]
# **Conclusion.** Trained further, the network depends on fewer directions in parameter space, and its minimum becomes
# flatter. Compare such values only at equal settings; `track` takes care of this. On the command line:
# `strati track checkpoints/ --data DATA --what loss,llc --loss behavioural-kl --out run`.
