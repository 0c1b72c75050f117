# %% [markdown]
# # 2. Is this layer trained?
#
# The embedded network comes with its initial weights. Compare the two: what does an untrained layer look
# like, and would its numbers have fooled you?

# %%
import strati
from strati import embedded

initial = strati.scan(embedded.path("digits-mlp-init.safetensors"))
trained = strati.scan(embedded.path("digits-mlp.safetensors"))
for name in ("0.weight", "2.weight"):
    before, after = initial[name].metrics(), trained[name].metrics()
    print(
        name,
        "| phase:",
        before["phase"],
        "->",
        after["phase"],
        "| spikes:",
        before["spikes"],
        "->",
        after["spikes"],
    )

# %% [markdown]
# The phase and the spikes tell them apart. The exponent alpha alone does not: an untrained layer has one too, and it
# can lie between 2 and 6, the range that is called well trained.

# %%
print("alpha of the untrained layer:", round(initial["0.weight"].metrics()["alpha"], 2))
print([flag.code for flag in initial["0.weight"].warnings])

# %% [markdown]
# `noise-like` is the warning to look for: the random bulk explains the spectrum, so the tail means nothing.

# %%
figure = strati.compare(
    embedded.path("digits-mlp-init.safetensors"), embedded.path("digits-mlp.safetensors")
).plot()

# %% [markdown]
# **What to take home.** "A layer is trained when something stands out of its random bulk. A layer marked `noise-like`
# shows no trace of training in its spectrum, whatever its alpha."
