"""Train the embedded language model and write it, its initial weights, an adapter and held-out texts into the package.

A Llama of 5 blocks (width 96, 6 heads, 3 key/value heads, MLP width 256) that predicts the next character of
Shakespeare in modern spelling. A LoRA adapter of rank 4 then learns the spelling of the First Folio of 1623. Both
texts are in the public domain; the package ``shakespeare`` carries them. The Tempest is held out from all training.
The weights are stored in bfloat16. Run from the project's root (about 40 minutes of one core):

    .venv/bin/python tools/make_embedded_transformer.py
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from strati_reproductions import zoo

FOLDER = Path(__file__).resolve().parents[1] / "src" / "strati" / "embedded"
UNKNOWN = "<unk>"
CHARACTERS = [UNKNOWN, "\n", *map(chr, range(32, 127))]
"""Every printable ASCII character has a token; some of them never occur in the training text."""
CONTEXT, BATCH, SEED = 128, 32, 0
STEPS, RATE, DECAY, WARM_UP = 4000, 3e-3, 0.1, 200
LORA_RANK, LORA_STEPS, LORA_RATE = 4, 800, 2e-3
HELD_OUT = "tempest"
HELD_OUT_CHARACTERS = 40_000


def texts(folder: Path, folio: bool) -> dict[str, str]:
    """The plays and poems by file name, in modern spelling or in that of the First Folio."""
    ending = "_gut_f.txt" if folio else "_gut.txt"
    works = {}
    for path in sorted(folder.glob(f"*{ending}")):
        text = path.read_text(encoding="latin-1").replace("\r", "")
        text = "".join(character for character in text if character in CHARACTERS[1:])
        works[path.name.removesuffix(ending)] = re.sub(r" +\n", "\n", re.sub(r"\n{3,}", "\n\n", text))
    return works


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, unk_token=UNKNOWN)


def encode(text: str) -> torch.Tensor:
    """Character numbers of a text."""
    index = {character: i for i, character in enumerate(CHARACTERS)}
    return torch.tensor([index.get(character, 0) for character in text])


def batches(text: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Random windows of the text, forever."""
    rng = np.random.default_rng(seed)
    while True:
        starts = torch.from_numpy(rng.integers(0, len(text) - CONTEXT, size=BATCH))
        yield text[starts[:, None] + torch.arange(CONTEXT)]


def train(
    model: torch.nn.Module,
    parameters: Iterable[torch.nn.Parameter],
    text: torch.Tensor,
    steps: int,
    rate: float,
    seed: int,
) -> None:
    """AdamW with linear warm-up and a cosine schedule."""
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
    model.train()
    for step, batch in zip(range(steps), batches(text, seed), strict=False):
        factor = min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        for group in optimiser.param_groups:
            group["lr"] = rate * factor
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*matrices, *vectors], 1.0)
        optimiser.step()
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, text: str) -> float:
    """Mean cross-entropy per character over consecutive windows."""
    tokens = encode(text)
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    return float(np.mean([model(input_ids=part, labels=part).loss.item() for part in rows.split(64)]))


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The network with its weights rounded to bfloat16, computed in float32."""
    return model.to(torch.bfloat16).to(torch.float32)


def main() -> None:
    """Train, write, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lora-steps", type=int, default=LORA_STEPS)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = zoo.path("shakespeare")
    modern, folio = texts(folder, folio=False), texts(folder, folio=True)
    held_out = {
        "tempest.txt": modern.pop(HELD_OUT)[:HELD_OUT_CHARACTERS],
        "tempest-folio.txt": folio.pop(HELD_OUT)[:HELD_OUT_CHARACTERS],
    }
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(CHARACTERS),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=5,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    losses = {}
    for name, state in (("shakespeare-init", "initial"), ("shakespeare", "trained")):
        if state == "trained":
            train(model, model.parameters(), encode("\n\n".join(modern.values())), options.steps, RATE, SEED)
        rounded(model).to(torch.bfloat16).save_pretrained(options.out / name)
        tokenizer().save_pretrained(options.out / name)
        model = LlamaForCausalLM.from_pretrained(options.out / name, dtype=torch.float32)
        losses[state] = {file: held_out_loss(model, text) for file, text in held_out.items()}
    config = LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        target_modules=["q_proj", "v_proj", "o_proj", "down_proj"],
        task_type="CAUSAL_LM",
        base_model_name_or_path="shakespeare",
    )
    torch.manual_seed(SEED)
    adapted = get_peft_model(model, config)
    trainable = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    train(adapted, trainable, encode("\n\n".join(folio.values())), options.lora_steps, LORA_RATE, SEED + 1)
    losses["adapted"] = {file: held_out_loss(adapted, text) for file, text in held_out.items()}
    adapted.peft_config["default"].base_model_name_or_path = "shakespeare"
    adapted.save_pretrained(options.out / "shakespeare-lora")
    (options.out / "shakespeare-lora" / "README.md").unlink()
    for weights in options.out.glob("shakespeare*/*.safetensors"):
        weights.chmod(0o644)
    for file, text in held_out.items():
        (options.out / file).write_text(text)
    (options.out / "shakespeare-losses.json").write_text(json.dumps(losses, indent=1) + "\n")
    print(json.dumps(losses, indent=1))


if __name__ == "__main__":
    main()
