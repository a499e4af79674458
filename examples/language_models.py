"""Language models as the public model builder of onnxruntime-genai writes them, from configurations, without a download.

    python examples/language_models.py FOLDER [MODEL ...]

writes `MODEL/PRECISION/model.onnx` for `MODELS`, in fp32 and in int4. They read `inputs_embeds`, so that there is a float input
to differentiate, a mask, and the caches of keys and values or the states; the decoder of Whisper reads tokens and caches.

Needs torch, transformers and onnxruntime-genai.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from onnx import helper, numpy_helper
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.models.qwen3_5 import modeling_qwen3_5

transformers.logging.set_verbosity_error()

WORDS, BATCH, LAYERS = 80, 2, 2  # the builder takes a layer with as many outputs as words for the head
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED = dict(SIZES)
_GATED |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
_GATED |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_GATED |= {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}
_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
_SPEECH = {
    "vocab_size": WORDS,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_target_positions": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}


@dataclass(frozen=True)
class LanguageModel:
    """The class of transformers and its settings; the precisions that the builder has for it.

    `past`: how many tokens its caches may hold; None where it has states, which begin at 0. `experts`: the layers after
    attention are MoE operators, put in by hand, because the builder does not know the class.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    precisions: tuple[str, ...] = ("fp32", "int4")
    kind: str = "CausalLM"
    past: int | None = 5
    experts: bool = False
    window: int = 0  # the rows that the cache of the first layer has, however many tokens it holds


MODELS = {
    "llama": LanguageModel("Llama"),
    "qwen2": LanguageModel("Qwen2"),
    "qwen3": LanguageModel("Qwen3"),
    "gemma": LanguageModel("Gemma"),
    "gemma2": LanguageModel("Gemma2", {"sliding_window": 6}, window=6),
    "phi": LanguageModel(
        "Phi",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 1.0, "hidden_act": "gelu"}
        | {"layer_norm_eps": 1e-6},
    ),
    "phi3": LanguageModel("Phi3", {"original_max_position_embeddings": 64}),
    "mistral": LanguageModel("Mistral", {"sliding_window": None}),
    "mixtral": LanguageModel("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, ("fp32",), experts=True),
    "gpt_oss": LanguageModel(
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        ("fp32",),
        window=6,
    ),
    "lfm2": LanguageModel("Lfm2", {"layer_types": ["conv", "full_attention"]}, past=None),
    "qwen3_5": LanguageModel(
        "Qwen3_5",
        {
            "text_config": _GATED,
            "vision_config": _VISION | {"patch_size": 4, "num_position_embeddings": 16},
            "image_token_id": 60,
            "video_token_id": 61,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
        },
        kind="ConditionalGeneration",
        past=None,
    ),
    "whisper": LanguageModel("Whisper", _SPEECH | {"tie_word_embeddings": False}, ("fp32",), "ConditionalGeneration"),
}


def build(name: str) -> Any:
    """The module, in evaluation mode; the same at every call."""
    model = MODELS[name]
    torch.manual_seed(0)
    settings = SIZES | model.settings if model.kind == "CausalLM" else model.settings
    if "num_local_experts" in settings:  # one that computes in float64
        settings = settings | {"experts_implementation": "batched_mm"}
    config = getattr(transformers, f"{model.name}Config")(**settings, attn_implementation="eager")
    module: nn.Module = getattr(transformers, f"{model.name}For{model.kind}")(config)
    if name == "qwen3_5":  # the builder writes the norm without the epsilon that transformers adds to it
        modeling_qwen3_5.l2norm = lambda x, dim=-1, eps=0.0: nn.functional.normalize(x, dim=dim, eps=eps)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.add_(0.15 * torch.randn_like(tensor))
    return module.eval()


def write(name: str, precision: str, folder: Path) -> Path:
    """Let the builder write the model, and return its path."""
    checkpoint, target = folder / name / "checkpoint", folder / name / precision
    module = build(name)
    if MODELS[name].experts:
        _dense(module).save_pretrained(checkpoint)
    else:
        module.save_pretrained(checkpoint)
    words = {f"t{k}": k for k in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(checkpoint)
    command = [
        sys.executable,
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        checkpoint,
        "-o",
        target,
        "-p",
        precision,
    ]
    options = ["-e", "cpu", "-c", folder / "cache"]
    if MODELS[name].name != "Whisper":
        options += ["--extra_options", "exclude_embeds=true"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=offline)
    if done.returncode:
        raise RuntimeError(f"The builder does not write {name} in {precision}: {done.stderr[-2000:]}")
    path = target / ("decoder.onnx" if MODELS[name].name == "Whisper" else "model.onnx")
    if MODELS[name].experts:
        onnx.save(_with_experts(onnx.load(path), module), path)
    elif precision == "int4":
        _without_rounding(path)
    return path


def _without_rounding(path: Path) -> None:
    """Let ONNX Runtime multiply floats: at the builder's accuracy_level of 4 it rounds what it multiplies to 8 bits."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    onnx.save(model, path)


def inputs(name: str, tokens: int, past: int) -> dict[str, np.ndarray]:
    """Feeds for `tokens` new tokens behind `past` of them, by the names of the builder's inputs."""
    draw = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return (0.5 * draw.standard_normal(shape)).astype(np.float32)

    if name == "whisper":
        caches = {
            f"past_{what}_{where}_{layer}": floats(BATCH, 4, past if where == "self" else 1500, 8)
            for what in ("key", "value")
            for where in ("self", "cross")
            for layer in range(LAYERS)
        }
        return {"input_ids": draw.integers(3, WORDS, (BATCH, tokens)).astype(np.int32)} | caches
    feeds = {"inputs_embeds": floats(BATCH, tokens, 32), "attention_mask": np.ones((BATCH, past + tokens), np.int64)}
    heads = (SIZES | MODELS[name].settings)["num_key_value_heads"]
    with_cache = (1,) if MODELS[name].past is None else range(LAYERS)
    for layer in with_cache:
        for what in ("key", "value"):
            rows = MODELS[name].window if MODELS[name].window and layer == 0 else past
            feeds[f"past_key_values.{layer}.{what}"] = floats(BATCH, heads, rows, 16)
    if name == "qwen3_5":
        places = np.broadcast_to(np.arange(past, past + tokens), (3, BATCH, tokens)).copy()
        feeds |= {"position_ids": places, "past.0.conv": np.zeros((BATCH, 64, 3), np.float32)}
        feeds["past.0.recurrent"] = np.zeros((BATCH, 4, 8, 8), np.float32)
    if name == "lfm2":
        feeds["past.0.conv"] = np.zeros((BATCH, 32, 2), np.float32)
    return feeds


def forward(name: str, module: Any, feeds: Mapping[str, Tensor]) -> Tensor:
    """The logits of torch at these feeds."""
    if name == "whisper":
        own, cross = (
            [(feeds[f"past_key_{where}_{k}"], feeds[f"past_value_{where}_{k}"]) for k in range(LAYERS)]
            for where in ("self", "cross")
        )
        cache: Any = EncoderDecoderCache(DynamicCache(own), DynamicCache(cross))
        hidden = torch.zeros(BATCH, 1500, 32, dtype=cross[0][0].dtype)
        result = module(
            decoder_input_ids=feeds["input_ids"].long(),
            encoder_outputs=(hidden,),
            past_key_values=cache,
            use_cache=True,
        )
        return result.logits  # type: ignore[no-any-return]
    keywords: dict[str, Any] = {}
    past = feeds["attention_mask"].shape[1] - feeds["inputs_embeds"].shape[1]
    if past:
        caches = [[feeds[f"past_key_values.{k}.{what}"] for what in ("key", "value")] for k in range(LAYERS)]
        pairs = [(key[:, :, :past], value[:, :, :past]) for key, value in caches]
        keywords = {"past_key_values": DynamicCache(pairs, config=module.config), "use_cache": True}
    return module(  # type: ignore[no-any-return]
        inputs_embeds=feeds["inputs_embeds"], attention_mask=feeds["attention_mask"], **keywords
    ).logits


def _dense(module: Any) -> Any:
    """A Mistral with the attention of a Mixtral."""
    same = {key: getattr(module.config, key) for key in ("rope_parameters", "rms_norm_eps", "sliding_window")}
    made = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **same))
    made.load_state_dict(module.state_dict(), strict=False)
    return made


def _with_experts(model: onnx.ModelProto, module: Any) -> onnx.ModelProto:
    """The model with a MoE operator in place of each layer's products after attention."""
    graph = model.graph
    for layer in range(LAYERS):
        at = f"/model/layers.{layer}/mlp/"
        inside = [node for node in graph.node if node.name.startswith(at)]
        made = {name for node in inside for name in node.output}
        [source] = {name for node in inside for name in node.input if name.startswith("/") and name not in made}
        result = inside[-1].output[0]
        experts = module.model.layers[layer].mlp
        gate, up = experts.experts.gate_up_proj.detach().chunk(2, 1)
        both = torch.stack((gate, up), 2).flatten(1, 2)  # a row of each in turn
        tensors = {"router": experts.gate.weight.detach().T, "fc1": both, "fc2": experts.experts.down_proj.detach()}
        for key, value in tensors.items():
            array = np.ascontiguousarray(value.numpy())
            graph.initializer.append(numpy_helper.from_array(array, f"model.layers.{layer}.{key}"))
        router, fc1, fc2 = (f"model.layers.{layer}.{key}" for key in tensors)
        rows = helper.make_node("Reshape", [f"{at}logits", f"{at}shape"], [f"{at}rows"], f"{at}Reshape")
        graph.initializer.append(numpy_helper.from_array(np.array([-1, 4]), f"{at}shape"))
        moe = helper.make_node(
            "MoE",
            [source, rows.output[0], fc1, "", fc2],
            [result],
            f"{at}MoE",
            domain="com.microsoft",
            activation_type="swiglu",
            activation_alpha=1.0,
            activation_beta=0.0,
            swiglu_fusion=1,
            k=2,
            normalize_routing_weights=1,
        )
        place = list(graph.node).index(inside[0])
        for node in inside:
            graph.node.remove(node)
        for node in reversed((helper.make_node("MatMul", [source, router], [f"{at}logits"], f"{at}MatMul"), rows, moe)):
            graph.node.insert(place, node)
    read = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)
    return model


def main() -> None:
    """Write language models."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    arguments = parser.parse_args()
    for name in arguments.models or MODELS:
        for precision in MODELS[name].precisions:
            print(write(name, precision, arguments.folder), flush=True)


if __name__ == "__main__":
    main()
