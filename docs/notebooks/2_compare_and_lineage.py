# %% [markdown]
# # 4. What did fine-tuning change?
#
# Two checkpoints of one network. Which layers moved, in how many directions, and is it a merged LoRA? We make a tuned
# network whose answer we know: a rank-2 update on one layer, nothing elsewhere.

# %%
import numpy as np
from safetensors.numpy import load_file

import strati
from strati import embedded

base = load_file(embedded.path("digits-mlp.safetensors"))
rng = np.random.default_rng(0)
tuned = dict(base)
update = 0.05 * rng.standard_normal((64, 2)) @ rng.standard_normal((2, 96))
tuned["2.weight"] = (base["2.weight"] + update).astype(np.float32)
result = strati.compare(base, tuned)
for layer in result.layers:
    print(layer.name, "|", layer.update_kind, "| rank of the update:", layer.update_rank)

# %% [markdown]
# The kind of an update is a test, not a look: `untouched` is bit for bit, `rounding` is what another dtype would do,
# `low-rank` has directions beyond what rounding explains, `dense` moves everything.

# %%
print(result)

# %%
figure = result.plot()

# %% [markdown]
# **What to take home.** "Only layer 2 changed, by an update of rank 2: this looks like a merged adapter." The same
# call takes a checkpoint and its GGUF, a base and a PEFT adapter, or a base and its quantised version.
