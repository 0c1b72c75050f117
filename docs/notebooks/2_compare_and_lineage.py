# %% [markdown]
# # 2. Compare checkpoints and find their origin
#
# Two questions about two checkpoints: what changed, and is one derived from the other? The embedded Llama comes with
# its initial weights and with a LoRA adapter that was trained on the spelling of the First Folio.

# %%
import strati
from strati import embedded

base = embedded.path("shakespeare")
changes = strati.compare(base, embedded.path("shakespeare-lora"))
print(str(changes).splitlines()[0])
changes.frame().groupby("role")[["relative_change", "update_rank"]].mean().round(2)

# %% [markdown]
# strati merged the adapter into the base and compared the result with the base. It found updates of rank 4 in four kinds
# of layers and no change elsewhere. The rank is the result of a test against rounding, so the answer would be the same
# if you had only the merged checkpoint.
#
# Full training changes every layer in all directions:

# %%
trained = strati.compare(embedded.path("shakespeare-init"), base)
print(str(trained).splitlines()[0])

# %% [markdown]
# Are two checkpoints related at all? `lineage` tests whether they were trained independently. It matches the hidden
# units by their incoming and by their outgoing weights. The two matchings agree only if the networks share their origin.

# %%
print("\n".join(str(strati.lineage(embedded.path("shakespeare-init"), base)).splitlines()[:10]))

# %% [markdown]
# Renumbering the hidden units does not hide the relation. We permute the units of one MLP and test again:

# %%
import numpy as np

weights = {layer.name: next(iter(layer.matrices())) for layer in strati.open(base).layers()}
order = np.random.default_rng(0).permutation(256)
renumbered = dict(weights)
for name in ("gate_proj", "up_proj"):
    key = f"model.layers.2.mlp.{name}.weight"
    renumbered[key] = weights[key][order]
renumbered["model.layers.2.mlp.down_proj.weight"] = weights["model.layers.2.mlp.down_proj.weight"][:, order]
pair = strati.lineage(weights, renumbered).pairs[0]
print(pair.kind, "| related:", pair.related)

# %%
figure = changes.plot()

# %% [markdown]
# **Conclusion.** The adapter changed 20 of 37 layers by updates of rank 4, and the trained network descends from its
# initial weights beyond any doubt. On the command line: `strati compare A B` and `strati lineage A B`.
