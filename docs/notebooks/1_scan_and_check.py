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
# Next, `scan` computes the spectrum of every weight matrix and compares it with that of random weights.

# %%
survey = strati.scan(model)
survey.frame().groupby("role")[["spikes", "stable_rank"]].mean().round(1)

# %% [markdown]
# `spikes` is the number of directions that random weights would not show. The feed-forward matrices of this network
# learned more directions than the attention matrices.
#
# One layer is marked:

# %%
marked = survey.frame().query("state != 'learned'")
for name in marked["name"]:
    print(name, "|", survey[name].state, "|", survey[name].phase)

# %% [markdown]
# `strati explain rank-collapse` says what this means: some of its directions are no larger than bfloat16 rounding. That
# is a property of this model and no damage in the file. How does the initial, untrained network look?

# %%
initial = strati.scan(embedded.path("shakespeare-init")).frame()
print(initial["state"].value_counts().to_dict())
print("alpha of an untrained layer:", round(initial.set_index("name")["alpha"]["lm_head.weight"], 1))

# %% [markdown]
# Nearly all layers are `random-like` or too small to decide. Note that an untrained layer has an exponent alpha as
# well; alpha alone does not show training.
#
# Look at one layer in detail: its eigenvalues, the range of random weights (shaded), and the tail.

# %%
figure = survey["model.layers.0.self_attn.q_proj"].plot()

# %% [markdown]
# **Conclusion.** The file is intact, 36 of 37 layers show training, and you may want to look at the output layer. Each of these
# statements is the result of a test with a known error rate. On the command line: `strati check MODEL` and
# `strati scan MODEL --html scan.html`.
