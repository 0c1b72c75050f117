# %% [markdown]
# # 4. Learning coefficient, curvature and influence of a small language model
#
# How many parameters does a language model use, how does this change during training, and which sentences act on the
# same parameters? We train a small transformer on letters, keep five checkpoints, and measure each of them.

# %%
import copy
import tempfile

import numpy as np
import torch

import strati
from strati import embedded

torch.manual_seed(0)
torch.set_num_threads(1)
alphabet = " abcdefghijklmnopqrstuvwxyz"
text = " ".join(
    "".join(c if c in alphabet else " " for c in embedded.path("tempest.txt").read_text().lower()).split()
)
tokens = torch.tensor([alphabet.index(c) for c in text[:24_000]]).reshape(-1, 16)


class LanguageModel(torch.nn.Module):
    """One attention head of width 10 over 16 letters."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(27, 10)
        self.positions = torch.nn.Parameter(0.1 * torch.randn(16, 10))
        self.queries, self.keys, self.values = (torch.nn.Linear(10, 10, bias=False) for _ in range(3))
        self.head = torch.nn.Linear(10, 27)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        scores = self.queries(x) @ self.keys(x).mT
        future = torch.ones_like(scores[0]).triu(1).bool()
        return self.head(x + scores.masked_fill(future, -1e9).softmax(-1) @ self.values(x))


model = LanguageModel()
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
checkpoints = {}
for step in range(1001):
    if step in (10, 30, 100, 300, 1000):
        checkpoints[step] = copy.deepcopy(model)
    batch = tokens[torch.randint(len(tokens), (128,))]
    loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
print(f"{sum(p.numel() for p in model.parameters())} parameters, loss {loss.item():.2f} nats per letter")

# %% [markdown]
# `track` measures all checkpoints with the same data, temperature and localisation, so that the values can be compared.
# The behavioural loss compares the outputs with those of the checkpoint itself. It has its minimum at every checkpoint,
# so the coefficient is defined before training has ended.

# %%
rows = tokens[:100].numpy()
with tempfile.TemporaryDirectory() as folder:
    run = strati.track(
        list(checkpoints.values()),
        steps=list(checkpoints),
        data=rows,
        what="llc",
        loss="behavioural-kl",
        gamma=100.0,
        chains=4,
        draws=300,
        out=folder,
    )
llc = run.series.query("what == 'llc'").set_index("step")[["value", "stderr"]]
llc.round(1)

# %% [markdown]
# Half the number of parameters would be 513.5. The coefficient is much smaller, and it grows while the model learns.
# It depends on the localisation `gamma`, so compare such values only at equal settings; `track` takes care of this.
#
# The curvature of the training loss grows as well. `trace` is the sum of the eigenvalues of the Hessian. For
# networks of this size it is exact.

# %%
for step, checkpoint in checkpoints.items():
    curvature = strati.curvature(checkpoint, "cross_entropy", rows, top=2, seed=0)
    print(f"step {step:5}: trace {curvature.trace:6.2f}, largest eigenvalues", np.round(curvature.top, 2))

# %% [markdown]
# The same sampler shows which rows of text use the same parameters. The loss kernel is the correlation of the losses of
# two rows while the parameters vary around the trained ones.

# %%
kernel = strati.influence(checkpoints[1000], "cross_entropy", rows, kind="kernel", gamma=100.0, seed=0)
print(str(kernel).splitlines()[0])
values = np.array(kernel.values, float) - np.eye(len(rows))
for first, second in zip(
    *np.unravel_index(np.argsort(-np.triu(values), axis=None)[:5], values.shape), strict=True
):
    pair = ["".join(alphabet[letter] for letter in rows[row]) for row in (first, second)]
    print(f"{values[first, second]:.2f} +- {kernel.stderr[first][second]:.2f}  {pair[0]!r} and {pair[1]!r}")

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(6, 3.2))
axis.errorbar(llc.index, llc["value"], yerr=2 * llc["stderr"], marker="o")
axis.set(xscale="log", xlabel="step", ylabel="learning coefficient")
figure.tight_layout()

# %% [markdown]
# **Conclusion.** While the model learns, it depends on more directions of its parameters, and the loss becomes more
# curved. Rows that share a word depend on the same parameters. On the command line:
# `strati track checkpoints/ --data DATA --what llc --loss behavioural-kl --gamma 100 --out run`,
# `strati curvature MODEL --data DATA` and `strati influence MODEL --data DATA --kind kernel`.
