"""The architectures on which refgrad is compared with torch.autograd: `ARCHITECTURES`, name -> how it is built.

They are built from configurations with random weights. Those that the benchmarks time have layers of a realistic size, the
others are as small as the architecture allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import modules
import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()

OPSET = 20  # the exporter's default; ONNX Runtime 1.19 loads it
BATCH = 4

Inputs = dict[str, Tensor]
Builder = Callable[[], tuple[nn.Module, Inputs]]


@dataclass(frozen=True)
class Architecture:
    """How a model is built.

    `noise`: the standard deviation of the noise on every weight. The exporter merges equal tensors, such as fresh biases; and
    a small width needs larger weights than the usual initialisation, or the gradient of the first layers vanishes. `seed`:
    one that keeps every Relu, MaxPool and the like far from a kink: near one, float32 may round to either side, and then two
    right gradients differ. `quick`: every change is tested with this model.
    """

    build: Builder
    opset: int = OPSET
    noise: float = 0.15
    seed: int = 0
    quick: bool = False


class Text(nn.Module):
    """A transformer that reads token ids plus a float prompt, so that there is an input to differentiate."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, prompt: Tensor) -> Tensor:
        """Map token ids [N, T] and a prompt [N, T, E] to hidden states [N, T, E]."""
        embeddings = self.model.get_input_embeddings()(input_ids)
        hidden: Tensor = self.model(inputs_embeds=embeddings + prompt).last_hidden_state
        return hidden


class Translation(Text):
    """An encoder that reads token ids plus a prompt, and a decoder that reads token ids."""

    def forward(self, input_ids: Tensor, prompt: Tensor, decoder_input_ids: Tensor) -> Tensor:  # type: ignore[override]
        """Map token ids [N, S], a prompt [N, S, E] and token ids [N, T] to hidden states [N, T, E]."""
        embeddings = self.model.get_input_embeddings()(input_ids)
        output = self.model(inputs_embeds=embeddings + prompt, decoder_input_ids=decoder_input_ids)
        hidden: Tensor = output.last_hidden_state
        return hidden


class Signal(nn.Module):
    """A model whose input is a float tensor: an image, a waveform, a spectrogram."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map the signal to hidden states."""
        hidden: Tensor = self.model(x).last_hidden_state
        return hidden


class Contrast(Signal):
    """The products of embedded images with embedded texts."""

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        """Map images [N, 3, H, W] and token ids [M, T] to logits [N, M]."""
        logits: Tensor = self.model(pixel_values=x, input_ids=input_ids).logits_per_image
        return logits


def _random(module: Callable[[], nn.Module], **shapes: tuple[int, ...]) -> Builder:
    """A module with normally distributed inputs."""
    return lambda: (module(), {key: torch.randn(shape) for key, shape in shapes.items()})


def _transformer(
    name: str, *, attention: str = "eager", arguments: dict[str, Any] | None = None, **settings: Any
) -> transformers.PreTrainedModel:
    """`name`Model with these arguments, from `name`Config with these settings."""
    config = getattr(transformers, f"{name}Config")(**settings, attn_implementation=attention)
    model: transformers.PreTrainedModel = getattr(transformers, f"{name}Model")(config, **arguments or {})
    return model


def _text(name: str, *, length: int = 10, **settings: Any) -> Builder:
    """A transformer for text. Token ids begin at 3: torch gives the embedding of a padding token no gradient."""

    def build() -> tuple[nn.Module, Inputs]:
        model = _transformer(name, **SIZES | settings)
        width = model.get_input_embeddings().weight.shape[1]
        return Text(model), {"input_ids": _tokens(2, length), "prompt": 0.1 * torch.randn(2, length, width)}

    return build


def _translation(name: str, **settings: Any) -> Builder:
    def build() -> tuple[nn.Module, Inputs]:
        inputs = {"input_ids": _tokens(2, 9), "prompt": 0.1 * torch.randn(2, 9, 32)}
        return Translation(_transformer(name, **settings)), inputs | {"decoder_input_ids": _tokens(2, 7)}

    return build


def _signal(name: str, shape: tuple[int, ...], part: str = "", **settings: Any) -> Builder:
    def build() -> tuple[nn.Module, Inputs]:
        model = _transformer(name, **settings)
        return Signal(model.get_submodule(part)), {"x": torch.randn(shape)}

    return build


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, 60, shape)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
LLAMA: dict[str, Any] = {"num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
GPT: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}


def _bert() -> tuple[nn.Module, Inputs]:
    model = _transformer(
        "Bert",
        arguments={"add_pooling_layer": False},
        vocab_size=1000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=128,
    )
    return Text(model), _tokens_and_prompt()


def _gpt2() -> tuple[nn.Module, Inputs]:
    model = _transformer("GPT2", vocab_size=1000, n_embd=256, n_layer=4, n_head=4, n_positions=128, **GPT)
    return Text(model), _tokens_and_prompt()


def _tokens_and_prompt() -> Inputs:
    return {"input_ids": torch.randint(0, 100, (BATCH, 64)), "prompt": 0.1 * torch.randn(BATCH, 64, 256)}


def _variational_auto_encoder() -> tuple[nn.Module, Inputs]:
    return modules.VariationalAutoEncoder(), {"x": torch.rand(3, 1, 16, 16), "noise": torch.randn(3, 6)}


def _graph_convolution() -> tuple[nn.Module, Inputs]:
    nodes = modules.GraphConvolution.nodes
    source, target = torch.randint(0, nodes, (2, 40))
    return modules.GraphConvolution(), {"x": torch.randn(nodes, 5), "source": source, "target": target}


def _embedding_bag() -> tuple[nn.Module, Inputs]:
    words, candidates = torch.randint(0, 50, (4, 9)), torch.randint(0, 30, (4, 6))
    return modules.EmbeddingBag(), {"words": words, "candidates": candidates, "x": torch.randn(4, 6)}


def _rotary_decoder() -> tuple[nn.Module, Inputs]:
    return modules.RotaryDecoder(), {"x": torch.randn(2, 9, 32), "position": torch.arange(9).repeat(2, 1)}


def _clip() -> tuple[nn.Module, Inputs]:
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = tower | {"vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 63, "bos_token_id": 62}
    image = tower | {"image_size": 16, "patch_size": 8}
    model = _transformer("CLIP", text_config=text, vision_config=image, projection_dim=24)
    ids = torch.cat((_tokens(3, 7), torch.full((3, 1), 63)), 1)
    return Contrast(model), {"x": torch.randn(2, 3, 16, 16), "input_ids": ids}


_SPEECH: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": [12, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
}

ARCHITECTURES = {
    # what the benchmarks time
    "mlp": Architecture(_random(modules.Mlp, x=(BATCH * 16, 256)), noise=0.02, quick=True),
    "resnet18": Architecture(_random(modules.ResNet18, x=(BATCH, 3, 64, 64)), noise=0.02, seed=15, quick=True),
    "bert": Architecture(_bert, noise=0.02, quick=True),
    "gpt2": Architecture(_gpt2, noise=0.02, quick=True),
    # recurrence
    "lstm": Architecture(_random(lambda: modules.Recurrent(nn.LSTM), x=(7, 3, 5)), quick=True),
    "gru": Architecture(_random(lambda: modules.Recurrent(nn.GRU), x=(7, 3, 5)), quick=True),
    # encoders of text
    "roberta": Architecture(_text("Roberta", arguments={"add_pooling_layer": False})),
    "distilbert": Architecture(_text("DistilBert", dim=32, hidden_dim=48, n_layers=2, n_heads=4)),
    "albert": Architecture(_text("Albert", embedding_size=16, arguments={"add_pooling_layer": False})),
    "electra": Architecture(_text("Electra", embedding_size=16)),
    "deberta_v2": Architecture(
        _text(
            "DebertaV2",
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=8,
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            conv_kernel_size=3,
        )
    ),
    "modernbert": Architecture(
        _text(
            "ModernBert",
            local_attention=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        )
    ),
    "fnet": Architecture(_text("FNet", pad_token_id=0)),
    # decoders of text
    "llama": Architecture(_text("Llama", **LLAMA)),
    "mistral": Architecture(_text("Mistral", sliding_window=4, **LLAMA)),
    "mixtral": Architecture(
        _text("Mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm", **LLAMA),
        quick=True,
    ),
    "qwen2": Architecture(_text("Qwen2", **LLAMA)),
    "qwen3": Architecture(_text("Qwen3", head_dim=8, **LLAMA)),
    "gemma": Architecture(_text("Gemma", head_dim=8, **LLAMA)),
    "gemma2": Architecture(_text("Gemma2", head_dim=8, sliding_window=4, **LLAMA)),
    "phi": Architecture(_text("Phi", partial_rotary_factor=0.5, **LLAMA)),
    "gpt_neox": Architecture(_text("GPTNeoX", **GPT)),
    "opt": Architecture(
        _text("OPT", ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=True, pad_token_id=1, use_cache=False)
    ),
    "bloom": Architecture(_text("Bloom", n_head=4, n_layer=2, **GPT)),
    "falcon": Architecture(_text("Falcon", alibi=False, **GPT)),
    "mamba": Architecture(
        _text("Mamba", length=5, state_size=4, expand=2, conv_kernel=3, time_step_rank=4, use_cache=False)
    ),
    # encoders with a decoder
    "t5": Architecture(
        _translation("T5", vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, use_cache=False)
    ),
    "bart": Architecture(
        _translation(
            "Bart",
            vocab_size=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=32,
            use_cache=False,
        )
    ),
    # vision
    "vit": Architecture(
        _signal(
            "ViT",
            (2, 3, 16, 16),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
            arguments={"add_pooling_layer": False},
        )
    ),
    "dinov2": Architecture(
        _signal(
            "Dinov2",
            (2, 3, 24, 24),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            mlp_ratio=2,
            image_size=16,
            patch_size=4,
        )
    ),
    "swin": Architecture(
        _signal(
            "Swin",
            (2, 3, 32, 32),
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            arguments={"add_pooling_layer": False},
        )
    ),
    "convnext": Architecture(
        _signal("ConvNext", (2, 3, 32, 32), hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], patch_size=2)
    ),
    "segformer": Architecture(
        _signal(
            "Segformer",
            (2, 3, 64, 64),
            hidden_sizes=[8, 16, 24, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 4],
            sr_ratios=[4, 2, 2, 1],
        )
    ),
    "poolformer": Architecture(
        _signal("PoolFormer", (2, 3, 64, 64), hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], mlp_ratio=2.0)
    ),
    # speech, text with images
    "wav2vec2": Architecture(_signal("Wav2Vec2", (2, 200), **_SPEECH)),
    "hubert": Architecture(
        _signal("Hubert", (2, 200), **_SPEECH | {"feat_extract_norm": "layer", "do_stable_layer_norm": True})
    ),
    "whisper": Architecture(
        _signal(
            "Whisper",
            (2, 8, 24),
            part="encoder",
            vocab_size=64,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_layers=1,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            max_source_positions=12,
            max_target_positions=12,
            pad_token_id=0,
        )
    ),
    "clip": Architecture(_clip),
    # written with torch alone
    "unet": Architecture(_random(modules.UNet, x=(2, 3, 16, 24)), quick=True),
    "mobilenet": Architecture(_random(modules.MobileNet, x=(2, 3, 32, 32))),
    "spatial_transformer": Architecture(_random(modules.SpatialTransformer, x=(3, 2, 16, 16))),
    "einsum_attention": Architecture(_random(modules.EinsumAttention, x=(3, 10, 24))),
    "mixer": Architecture(_random(modules.Mixer, x=(3, 3, 16, 16))),
    "temporal_convnet": Architecture(_random(modules.TemporalConvNet, x=(3, 4, 20))),
    "variational_auto_encoder": Architecture(_variational_auto_encoder),
    "real_nvp": Architecture(_random(modules.RealNvp, x=(7, 6))),
    "fourier_net": Architecture(_random(modules.FourierNet, x=(3, 16, 2))),
    "graph_convolution": Architecture(_graph_convolution),
    "embedding_bag": Architecture(_embedding_bag),
    # with the operators of newer opsets
    "rotary_decoder_23": Architecture(_rotary_decoder, opset=23, quick=True),
    "llama_23": Architecture(_text("Llama", attention="sdpa", **LLAMA), opset=23),
    "qwen3_23": Architecture(_text("Qwen3", attention="sdpa", head_dim=8, **LLAMA), opset=23),
    "gemma3_23": Architecture(_text("Gemma3Text", attention="sdpa", head_dim=8, sliding_window=4, **LLAMA), opset=23),
}
