"""Residual networks and vision transformers rebuilt from tensors alone, against transformers' own; Llama from GGUF."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.io.to_module import as_module


def scrambled(model: nn.Module) -> nn.Module:
    """Statistics and scales that differ, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "running_var" in name:
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
            elif value.is_floating_point() and value.ndim == 1:
                value.add_(0.3 * torch.randn(value.shape, generator=generator))
    return model.eval()


def resnet_names(name: str) -> str:
    """transformers' names of a ResNet as torchvision and timm write them."""
    name = name.removeprefix("resnet.")
    name = re.sub(r"^embedder\.embedder\.(convolution|normalization)", r"\1", name)
    if name.startswith(("convolution", "normalization")):
        return name.replace("convolution", "conv1").replace("normalization", "bn1")
    name = re.sub(r"^encoder\.stages\.(\d+)\.layers\.(\d+)", lambda m: f"layer{int(m[1]) + 1}.{m[2]}", name)
    name = name.replace("shortcut.convolution", "downsample.0").replace(
        "shortcut.normalization", "downsample.1"
    )
    name = re.sub(r"\.layer\.(\d)\.convolution", lambda m: f".conv{int(m[1]) + 1}", name)
    name = re.sub(r"\.layer\.(\d)\.normalization", lambda m: f".bn{int(m[1]) + 1}", name)
    return name.replace("classifier.1", "fc")


def resnet(kind: str, depths: list[int]) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    sizes = [16, 32, 64, 128] if kind == "bottleneck" else [8, 16, 32, 64]
    config = ResNetConfig(embedding_size=8, hidden_sizes=sizes, depths=depths, layer_type=kind, num_labels=7)
    return scrambled(ResNetForImageClassification(config))


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@pytest.mark.parametrize("depths", [[1, 1, 1, 1], [2, 1, 3, 2]])
def test_residual_networks_compute_what_transformers_does(kind, depths, tmp_path):
    original = resnet(kind, depths)
    named = {resnet_names(name): value for name, value in original.state_dict().items()}
    torch.save(named, tmp_path / "resnet.pth")
    rebuilt = as_module(tmp_path / "resnet.pth")
    x = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(x), original(x).logits, rtol=1e-4, atol=1e-5)
    assert set(rebuilt.state_dict()) == set(named)
    assert not rebuilt.training


def test_residual_networks_for_small_images():
    """Option A of He et al., as the CIFAR networks have it; and the one with 1x1 shortcuts under its own names."""
    from strati_reproductions.trained.networks import CifarResNet

    torch.manual_seed(0)
    original = scrambled(CifarResNet(14, 8))
    x = torch.randn(2, 3, 32, 32)
    for state in (original.state_dict(), {f"module.{k}": v for k, v in original.state_dict().items()}):
        rebuilt = as_module(state)
        torch.testing.assert_close(rebuilt(x), original(x))
    bent = {k: v for k, v in original.state_dict().items() if not k.startswith("linear")}
    assert as_module(bent)(x).shape == (2, 32)  # features, where there is no classifier


def test_grouped_convolutions_are_told_from_the_shapes():
    """One bottleneck of a ResNeXt by hand."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16))
    body = nn.ModuleList([nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)])
    body += [nn.Conv2d(16, 16, 3, 1, 1, groups=4, bias=False), nn.BatchNorm2d(16)]
    body += [nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)]
    whole = scrambled(nn.ModuleDict({"stem": stem, "body": body, "fc": nn.Linear(16, 5)}))
    x = torch.randn(2, 3, 8, 8)
    y = torch.relu(stem(x))
    z = torch.relu(body[1](body[0](y)))
    z = torch.relu(body[3](body[2](z)))
    expected = whole["fc"](torch.relu(body[5](body[4](z)) + y).mean(dim=(2, 3)))
    names = {"stem.0": "conv1", "stem.1": "bn1"}
    names |= {f"body.{2 * i}": f"layer1.0.conv{i + 1}" for i in range(3)}
    names |= {f"body.{2 * i + 1}": f"layer1.0.bn{i + 1}" for i in range(3)}
    state = {}
    for name, value in whole.state_dict().items():
        module, _, last = name.rpartition(".")
        state[f"{names.get(module, module)}.{last}"] = value
    torch.testing.assert_close(as_module(state)(x), expected)


def vit(width: int, heads: int, **options) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=2 * width,
        image_size=16, patch_size=4, num_labels=5, layer_norm_eps=1e-6, **options,
    )  # fmt: skip
    return scrambled(ViTForImageClassification(config))


PARTS = {
    "cls": "vit.embeddings.cls_token",
    "pos": "vit.embeddings.position_embeddings",
    "patch": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
}


def vit_state(model: nn.Module, style: str) -> dict[str, torch.Tensor]:
    """transformers' weights under torchvision's or timm's names."""
    old = model.state_dict()
    timm = style == "timm"
    state = {
        "cls_token" if timm else "class_token": old[PARTS["cls"]],
        "pos_embed" if timm else "encoder.pos_embedding": old[PARTS["pos"]],
    }
    wholes = {"patch": "patch_embed.proj", "norm": "norm", "head": "head"}
    wholes = wholes if timm else {"patch": "conv_proj", "norm": "encoder.ln", "head": "heads.head"}
    layers = model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer
    prefix = "vit.layers" if hasattr(model.vit, "layers") else "vit.encoder.layer"
    for kind in ("weight", "bias"):
        state |= {f"{new}.{kind}": old[f"{PARTS[part]}.{kind}"] for part, new in wholes.items()}
        for i in range(len(layers)):
            inside = {
                n.removeprefix(f"{prefix}.{i}."): v for n, v in old.items() if n.startswith(f"{prefix}.{i}.")
            }
            qkv = torch.cat(
                [_one(inside, kind, word) for word in ("q_proj|query", "k_proj|key", "v_proj|value")]
            )
            out = _one(inside, kind, "o_proj|attention.output.dense")
            up, down = (
                _one(inside, kind, "fc1|intermediate.dense"),
                _one(inside, kind, "fc2|(?<!attention.)output.dense"),
            )
            before, after = _one(inside, kind, "layernorm_before"), _one(inside, kind, "layernorm_after")
            if timm:
                names = {"norm1": before, "attn.qkv": qkv, "attn.proj": out, "norm2": after}
                names |= {"mlp.fc1": up, "mlp.fc2": down}
                state |= {f"blocks.{i}.{name}.{kind}": value for name, value in names.items()}
            else:
                base = f"encoder.layers.encoder_layer_{i}"
                state[f"{base}.self_attention.in_proj_{kind}"] = qkv
                names = {
                    "ln_1": before,
                    "self_attention.out_proj": out,
                    "ln_2": after,
                    "mlp.0": up,
                    "mlp.3": down,
                }
                state |= {f"{base}.{name}.{kind}": value for name, value in names.items()}
    return state


def _one(inside: dict[str, torch.Tensor], kind: str, pattern: str) -> torch.Tensor:
    (found,) = [v for n, v in inside.items() if re.search(rf"(^|\.)({pattern})\.{kind}$", n)]
    return found


@pytest.mark.parametrize("style", ["timm", "torchvision"])
@pytest.mark.parametrize(("width", "heads", "told"), [(192, 3, None), (48, 4, 4)])
def test_vision_transformers_compute_what_transformers_does(style, width, heads, told, tmp_path):
    original = vit(width, heads)
    state = vit_state(original, style)
    torch.save(state, tmp_path / "vit.pth")
    rebuilt = as_module(tmp_path / "vit.pth", heads=told)
    x = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(x), original(x).logits, rtol=1e-4, atol=1e-5)
    assert set(rebuilt.state_dict()) == set(state)


def test_heads_that_no_tensor_holds_must_be_given():
    state = vit_state(vit(48, 4), "timm")
    with pytest.raises(strati.StratiError, match=r"heads: no tensor holds.*give heads="):
        as_module(state)
    with pytest.raises(strati.StratiError, match="do not divide"):
        as_module(state, heads=5)


def test_timms_variants():
    """Layer scale of one and norms of fresh queries change what they should; mean pooling, no class token."""
    original = vit(192, 3)
    state = vit_state(original, "timm")
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        plain = as_module(state)(x)
        ones = {f"blocks.{i}.ls{k}.gamma": torch.ones(192) for i in range(2) for k in (1, 2)}
        torch.testing.assert_close(as_module(state | ones)(x), plain)
        zeros = {name: 0 * value for name, value in ones.items()}
        frozen = as_module(state | zeros)
        tokens = frozen.patch_embed(x)
        positions = state["pos_embed"]
        first = (state["cls_token"] + positions[:, :1]).expand(2, -1, -1)
        torch.testing.assert_close(frozen(x), frozen.head(frozen.norm(first))[:, 0])
        bare = {
            k: v for k, v in (state | zeros).items() if k not in ("cls_token", "norm.weight", "norm.bias")
        }
        bare |= {
            "pos_embed": positions[:, 1:],
            "fc_norm.weight": state["norm.weight"],
            "fc_norm.bias": state["norm.bias"],
        }
        pooled = frozen.norm((tokens + positions[:, 1:]).mean(1))
        torch.testing.assert_close(as_module(bare)(x), frozen.head(pooled))


def test_a_folder_with_timms_config(tmp_path):
    from safetensors.torch import save_file

    state = {k: v.contiguous() for k, v in vit_state(vit(192, 3), "timm").items()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch4_16", "num_classes": 5}')
    assert as_module(tmp_path)(torch.zeros(1, 3, 16, 16)).shape == (1, 5)


@pytest.mark.parametrize("extra", ["layer1.0.se.fc1.weight", "blocks.0.attn.rel_pos.weight"])
def test_tensors_of_another_network_are_refused_by_name(extra):
    state = (
        {resnet_names(n): v for n, v in resnet("basic", [1, 1, 1, 1]).state_dict().items()}
        if extra.startswith("layer")
        else vit_state(vit(192, 3), "timm")
    )
    with pytest.raises(strati.StratiError, match=re.escape(extra)):
        as_module(state | {extra: torch.ones(2, 2)})


def test_half_precision_is_computed_in_single_and_double_stays(tmp_path):
    state = vit_state(vit(192, 3), "timm")
    for dtype, wanted in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        model = as_module({name: value.to(dtype) for name, value in state.items()})
        assert {p.dtype for p in model.parameters()} == {wanted}


# -- perceptrons with dotted names, modules, GGUF -----------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ["net.0", "net.2", "net.4"],
        ["layers.0", "layers.1", "layers.2"],
        ["encoder.fc1", "encoder.fc2", "decoder.out"],
        ["a.fc", "b.fc", "a.out"],  # back to a container that was left: flat names
        ["fc", "fc.1", "fc.2"],
    ],
)
def test_perceptrons_keep_their_dotted_names(names):
    torch.manual_seed(0)
    linears = [nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)]
    state = {f"{n}.{k}": p for n, m in zip(names, linears, strict=True) for k, p in m.state_dict().items()}
    model = as_module(state, activation="tanh")
    x = torch.randn(7, 4)
    torch.testing.assert_close(model(x), linears[2](torch.tanh(linears[1](torch.tanh(linears[0](x))))))
    flat = names in (["a.fc", "b.fc", "a.out"], ["fc", "fc.1", "fc.2"])
    expected = (
        {k.rpartition(".")[0].replace(".", "_") + f".{k.rpartition('.')[2]}" for k in state}
        if flat
        else set(state)
    )
    assert set(model.state_dict()) == expected
    assert [layer.name for layer in strati.degeneracy(model, x).layers] == names


def test_a_module_is_returned_as_it_is():
    model = nn.Conv2d(1, 2, 3)
    assert as_module(model) is model
    assert as_module(strati.open(model)) is model


def test_llama_from_gguf_computes_what_the_original_does(tmp_path):
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    original = LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=40, max_position_embeddings=16)
    ).eval()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(16)
    writer.add_layer_norm_rms_eps(original.config.rms_norm_eps)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inner = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, value in original.state_dict().items():
        array = value.numpy()
        module = name.removesuffix(".weight")
        found = re.fullmatch(r"model\.layers\.(\d)\.(.*)", module)
        new = f"blk.{found[1]}.{inner[found[2]]}" if found else names[module]
        if new.endswith(("attn_q", "attn_k")):  # llama.cpp's order of the rotary halves
            heads = 4 if new.endswith("attn_q") else 2
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"{new}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens = torch.randint(0, 40, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(as_module(tmp_path / "m.gguf")(tokens).logits, original(tokens).logits)
