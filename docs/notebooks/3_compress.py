# %% [markdown]
# # 3. Compress a transformer to half, with the loss measured
#
# How small can the embedded Llama get? We change every layer, measure the loss on text that the network has not seen,
# and let strati choose a rank for every layer.

# %%
import numpy as np
from transformers import AutoTokenizer

import strati
from strati import embedded

folder = embedded.path("shakespeare")
text = embedded.path("tempest.txt").read_text()[:3072]
tokens = np.array(AutoTokenizer.from_pretrained(folder)(text)["input_ids"]).reshape(-1, 128)
model = strati.as_module(folder)
measured = strati.study(
    model,
    data=tokens,
    performance="loss",
    interventions=[strati.truncate(parameters=[0.3, 0.5, 0.7]), strati.quantise(bits=[4, 3, 2], group=32)],
)
table = measured.frame()
table["rise"] = table["performance"] - table["intact_performance"]
table["block"] = table["layer"].str.extract(r"layers\.(\d)", expand=False).fillna("outside")
table[table["intervention"] != "intact"].pivot_table("rise", "block", ["intervention", "setting"]).round(3)

# %% [markdown]
# Each number is the mean rise of the loss when one layer of the block is changed. Rounding to 4 bits costs almost
# nothing; removing half of the parameters of a layer costs more.
#
# Now change all layers together. A plan distributes a budget over the layers and is measured next to the same
# treatment of every layer.

# %%
half = strati.plan(measured, budget="parameters=0.5", action="truncate")
print("\n".join(str(half).splitlines()[:4]))

# %%
bits = strati.plan(measured, budget="bits=4", action="quantise")
print("\n".join(str(bits).splitlines()[:4]))

# %% [markdown]
# Both numbers are measurements with 95 % intervals. For this network rounding is the far better way to save memory.
# Write the smaller model with `strati.apply(plan, folder, out=...)`; without `out=` you get the module itself:

# %%
small = strati.apply(bits, model)
print(type(small).__name__, sum(p.numel() for p in small.parameters()), "parameters")

# %%
figure = measured.plot()

# %% [markdown]
# **Conclusion.** Low rank at half the parameters raises the loss of this network strongly, although the plan is much
# better than the same rank everywhere. Four bits per weight, a quarter of the size of bfloat16, cost little. On the
# command line: `strati plan MODEL --data text.txt --budget bits=4`.
