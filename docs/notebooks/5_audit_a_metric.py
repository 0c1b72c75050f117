# %% [markdown]
# # 3. Which layers does my network need, and which metric told me?
#
# Do not ask a metric; change the layer and look. `study` re-initialises and re-randomises each layer in turn and
# measures what the network loses. It works on your own module, data and measure; here on the digits.

# %%
import numpy as np

import strati
from strati import embedded

data = np.load(embedded.path("digits.npz"))
model = strati.as_module(embedded.path("digits-mlp.safetensors"))
first = strati.as_module(embedded.path("digits-mlp-init.safetensors"))
found = strati.study(
    model,
    data=(data["x_test"], data["y_test"]),
    initial=first,
    interventions=["reinitialise", "rerandomise", strati.truncate(rank=[2, 8, 32])],
    draws=3,
)
table = found.frame()
table.groupby(["intervention", "setting", "layer"], dropna=False)["performance"].mean().unstack().round(3)

# %% [markdown]
# The intact network is right in 98 of 100 cases. No layer can be replaced by random weights of the same size, the
# last one can nearly go back to where training began, and a few directions carry nearly everything: rank 8 is almost
# enough.
#
# Would a metric of the weights alone have told you so? `audit` correlates each metric with what was lost, corrects
# for the number of metrics tried, and says what to do.

# %%
judged = strati.audit(found)
for verdict in judged.verdicts:
    if verdict.intervention is None and verdict.metric in ("alpha", "stable_rank", "activation_disagreement"):
        print(verdict.metric, "|", verdict.recommendation, "|", verdict.text)

# %% [markdown]
# With three layers the honest answer is mostly "cannot tell", and that is what it says. A study of many networks
# (`strati study fcn-mnist`) decides: alpha does not predict what a layer is worth.

# %%
figure = found.plot()

# %% [markdown]
# **What to take home.** "Measured by intervention, rank 8 of each layer keeps nearly all of the accuracy; no metric
# of the weights alone has earned our trust on three layers."
