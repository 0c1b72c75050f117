# %% [markdown]
# # 1. What is in this checkpoint?
#
# You were handed a file. Before anything else: which layers does it hold, and what do their spectra say? We use the
# small network that comes with strati, an MLP trained on 8x8 digits; any path, Hugging Face directory, state dict or
# module in memory works the same way.

# %%
import strati
from strati import embedded

net = strati.open(embedded.path("digits-mlp.safetensors"))
print(strati.inspect(net))

# %% [markdown]
# Only names and shapes have been read so far. `scan` reads one matrix at a time and surveys its spectrum.

# %%
survey = strati.scan(net)
survey.table[["name", "rows", "cols", "state", "spikes", "stable_rank", "phase"]]

# %% [markdown]
# Two layers have spikes above the random bulk: directions that training put there. The last one has ten eigenvalues,
# too few to say anything, and strati says so instead of guessing:

# %%
[(flag.code, flag.text) for flag in survey["4"].warnings]

# %% [markdown]
# One layer in detail: the eigenvalues, the bulk that random weights of this size would have (shaded), and the tail.

# %%
figure = survey["0"].plot()

# %% [markdown]
# **What to take home.** "Layers 0 and 2 carry about ten directions each above what random weights would show; layer 4
# is too small for its spectrum to mean anything." You can state this safely: every part of it was statistically tested.
