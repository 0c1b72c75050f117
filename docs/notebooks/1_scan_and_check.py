# %% [markdown]
# # 1. Scan and check a checkpoint
#
# You received a checkpoint. Is it complete and intact, and which layers show training? This notebook uses the small
# Llama that comes with strati. Replace the path by your own file, directory or Hugging Face name.

# %%
import strati
from strati import embedded

model = embedded.path("shakespeare")
result = strati.check(model)
print(str(result).splitlines()[0])

# %% [markdown]
# `check` reads every tensor once. It looks for NaN, constant tensors, missing tensors, holes and wrong sizes. Use
# `result.passed` in a test.
#
# Next, `scan` computes the spectrum of every weight matrix and compares it with that of random weights. We look at the
# five blocks; `layers=` takes names, roles and blocks.

# %%
survey = strati.scan(model, layers=["block:0-4"])
print(survey.frame()["state"].value_counts().to_dict())
survey.frame().groupby("role")[["spikes", "stable_rank"]].mean().round(1)

# %% [markdown]
# All layers are `learned`. `spikes` is the number of directions that random weights would not show. The feed-forward
# matrices of this network learned more directions than the attention matrices.
#
# How does the initial, untrained network look?

# %%
initial = strati.scan(embedded.path("shakespeare-init"), layers=["block:0-4"]).frame()
print(initial["state"].value_counts().to_dict())
print(
    "alpha of an untrained layer:",
    round(initial.set_index("name")["alpha"]["model.layers.0.mlp.up_proj.weight"], 1),
)

# %% [markdown]
# Nearly all layers are `random-like` or too small to decide. Note that an untrained layer has an exponent alpha as
# well; alpha alone does not show training.
#
# Look at one layer in detail: its eigenvalues, the range of random weights (shaded), and the tail.

# %%
figure = survey["model.layers.0.self_attn.q_proj"].plot()

# %% [markdown]
# **Conclusion.** The file is intact, and all 35 matrices of the blocks show training. Each of these statements is the result
# of a test with a known error rate. On the command line: `strati check MODEL` and `strati scan MODEL --html scan.html`.
