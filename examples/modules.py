"""Small networks written with torch alone: one architecture each, with everything that defines it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    """Four linear layers, each followed by another activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(256, 1024), nn.ReLU()),
            *(nn.Linear(1024, 1024), nn.GELU()),
            *(nn.Linear(1024, 256), nn.Tanh()),
            nn.Linear(256, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, 256] to [N, 10]."""
        logits: Tensor = self.layers(x)
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, channels_in, H, W] to [N, channels, H / stride, W / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        output: Tensor = (y + shortcut).relu()
        return output


class ResNet18(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition" (2015), table 1, with torchvision's parameter names."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, 3, H, W] to logits [N, classes]."""
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class UNet(nn.Module):
    """Ronneberger et al., "U-Net" (2015), three levels; up by a transposed convolution, bilinear and nearest."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList((self._block(3, 8), self._block(8, 16), self._block(16, 24)))
        self.bottom = self._block(24, 32)
        self.transposed = nn.ConvTranspose2d(32, 24, 3, stride=2, padding=1, output_padding=1)
        self.up = nn.ModuleList((self._block(48, 16), self._block(32, 8), self._block(16, 8)))
        self.head = nn.Conv2d(8, 2, 1)

    @staticmethod
    def _block(channels_in: int, channels: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(channels_in, channels, 3, padding=1, bias=False), nn.GroupNorm(4, channels), nn.SiLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.SiLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, 3, H, W] to logits [N, 2, H, W]; H and W are multiples of 8."""
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.transposed(self.bottom(x))
        x = self.up[0](torch.cat((x, skipped[2]), 1))
        x = functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = self.up[1](torch.cat((x, skipped[1]), 1))
        x = functional.interpolate(x, scale_factor=2, mode="nearest")
        logits: Tensor = self.head(self.up[2](torch.cat((x, skipped[0]), 1)))
        return logits


class MobileBlock(nn.Module):
    """An inverted residual: expand, convolve each channel, squeeze and excite, project."""

    def __init__(self, channels_in: int, channels: int, stride: int, kernel: int) -> None:
        super().__init__()
        wide = 3 * channels_in
        self.expand = nn.Sequential(nn.Conv2d(channels_in, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, kernel, stride, padding=kernel // 2, groups=wide, bias=False), nn.BatchNorm2d(wide)
        )
        self.excite = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 8, 1), nn.ReLU(), nn.Conv2d(8, wide, 1), nn.Hardsigmoid())
        )
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.residual = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, channels_in, H, W] to [N, channels, H / stride, W / stride]."""
        y = self.depthwise(self.expand(x))
        y = self.project(functional.relu6(y * self.excite(y)))
        return x + y if self.residual else y


class MobileNet(nn.Module):
    """Howard et al., "Searching for MobileNetV3" (2019), four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, padding=1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        self.blocks = nn.Sequential(
            *(MobileBlock(8, 8, 1, 3), MobileBlock(8, 16, 2, 5), MobileBlock(16, 16, 1, 5), MobileBlock(16, 24, 2, 3)),
        )
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, 3, H, W] to logits [N, 10]."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


class SpatialTransformer(nn.Module):
    """Jaderberg et al., "Spatial Transformer Networks" (2015): the image is resampled where a network looks."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(
            *(nn.Conv2d(2, 8, 5, stride=2), nn.Tanh(), nn.Conv2d(8, 8, 3, stride=2), nn.Tanh(), nn.Flatten()),
            *(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 6)),
        )
        self.read = nn.Sequential(nn.Conv2d(2, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(800, 10))
        self.register_buffer("identity", torch.tensor([[1.0, 0, 0], [0, 1.0, 0]]))

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, 2, 16, 16] to logits [N, 10]."""
        theta = self.identity + 0.3 * self.look(x).reshape(-1, 2, 3).tanh()
        grid = functional.affine_grid(theta, [x.shape[0], 2, 12, 12], align_corners=False)
        logits: Tensor = self.read(functional.grid_sample(x, grid, padding_mode="zeros", align_corners=False))
        return logits


class EinsumAttention(nn.Module):
    """Multi-head attention in which every contraction is an einsum, with grouped keys and a bias per distance."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(24, 2, 2, 8) / 5)
        self.key = nn.Parameter(torch.randn(24, 2, 8) / 5)
        self.value = nn.Parameter(torch.randn(24, 2, 8) / 5)
        self.out = nn.Parameter(torch.randn(2, 2, 8, 24) / 5)
        self.distance = nn.Parameter(torch.randn(2, 2, 10, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, 10, 24] to the same shape."""
        query = torch.einsum("nte,eghd->nghtd", x, self.query)
        key = torch.einsum("nse,egd->ngsd", x, self.key)
        value = torch.einsum("nse,egd->ngsd", x, self.value)
        scores = torch.einsum("nghtd,ngsd->nghts", query, key) / math.sqrt(8) + self.distance
        read = torch.einsum("nghts,ngsd->nghtd", scores.softmax(-1), value)
        return x + torch.einsum("nghtd,ghde->nte", read, self.out)


class Mixer(nn.Module):
    """Tolstikhin et al., "MLP-Mixer" (2021), two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(5))
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(2))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, 3, 16, 16] to logits [N, 10]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for k in range(2):
            x = x + self.tokens[k](self.norms[2 * k](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[k](self.norms[2 * k + 1](x))
        logits: Tensor = self.head(self.norms[4](x).mean(1))
        return logits


class TemporalConvNet(nn.Module):
    """Bai et al., "An Empirical Evaluation of Generic Convolutional and Recurrent Networks" (2018): dilated, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(4 if k == 0 else 16, 16, 3, dilation=2**k))
            for k in range(4)
        )
        self.shortcut = nn.Conv1d(4, 16, 1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map a sequence [N, 4, T] to [N, T, 3]."""
        for k, layer in enumerate(self.layers):
            y = functional.elu(layer(functional.pad(x, (2 << k, 0))))
            x = y + (self.shortcut(x) if k == 0 else x)
        output: Tensor = self.head(x.transpose(1, 2))
        return output


class VariationalAutoEncoder(nn.Module):
    """Kingma & Welling, "Auto-Encoding Variational Bayes" (2013): the evidence lower bound of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, 8, 4, stride=2, padding=1), nn.Softplus(), nn.Conv2d(8, 16, 4, stride=2, padding=1)),
            *(nn.Softplus(), nn.Flatten(), nn.Linear(256, 32), nn.SELU(), nn.Linear(32, 12)),
        )
        self.decoder = nn.Sequential(
            *(nn.Linear(6, 256), nn.SELU(), nn.Unflatten(1, (16, 4, 4))),
            *(nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.Softplus()),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
        )

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Map images [N, 1, 16, 16] in [0, 1] and noise [N, 6] to a bound [N]."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        logits = self.decoder(mean + noise * (log_variance / 2).exp())
        likelihood = x * logits - functional.softplus(logits)
        divergence = (log_variance.exp() + mean.square() - 1 - log_variance) / 2
        return likelihood.sum((1, 2, 3)) - divergence.sum(1)


class RealNvp(nn.Module):
    """Dinh et al., "Density estimation using Real NVP" (2016): the log density of each point."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 6)) for _ in range(4))
        self.scale = nn.Parameter(torch.zeros(4, 3))
        self.log_diagonal = nn.Parameter(torch.zeros(6))
        self.register_buffer("order", torch.tensor([3, 0, 4, 1, 5, 2]))

    def forward(self, x: Tensor) -> Tensor:
        """Map points [N, 6] to [N]."""
        log_determinant = self.log_diagonal.sum()
        z = x * self.log_diagonal.exp()
        for net, scale in zip(self.nets, self.scale, strict=True):
            kept, changed = z[:, :3], z[:, 3:]
            log_scale, shift = net(kept).split(3, 1)
            log_scale = log_scale.tanh() * scale.exp()
            z = torch.cat((kept, changed * log_scale.exp() + shift), 1)[:, self.order]
            log_determinant = log_determinant + log_scale.sum(1)
        return log_determinant - z.square().sum(1) / 2 - 3 * math.log(2 * math.pi)


class FourierNet(nn.Module):
    """Li et al., "Fourier Neural Operator" (2020), one axis: convolutions as products of low frequencies."""

    modes = 5

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(2, 12)
        self.real = nn.Parameter(torch.randn(2, 12, 12, self.modes) / 12)
        self.imaginary = nn.Parameter(torch.randn(2, 12, 12, self.modes) / 12)
        self.pointwise = nn.ModuleList(nn.Conv1d(12, 12, 1) for _ in range(2))
        self.project = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map a function [N, T, 2] to [N, T, 1]."""
        x = self.lift(x).transpose(1, 2)
        length = x.shape[-1]
        for k, pointwise in enumerate(self.pointwise):
            spectrum = torch.fft.rfft(x, dim=-1)[..., : self.modes]
            real, imaginary = self.real[k], self.imaginary[k]
            parts = (
                torch.einsum("nct,cdt->ndt", spectrum.real, real)
                - torch.einsum("nct,cdt->ndt", spectrum.imag, imaginary),
                torch.einsum("nct,cdt->ndt", spectrum.real, imaginary)
                + torch.einsum("nct,cdt->ndt", spectrum.imag, real),
            )
            product = torch.complex(*(functional.pad(part, (0, length // 2 + 1 - self.modes)) for part in parts))
            x = functional.gelu(torch.fft.irfft(product, n=length, dim=-1) + pointwise(x))
        output: Tensor = self.project(x.transpose(1, 2))
        return output


class GraphConvolution(nn.Module):
    """Kipf & Welling (2016) and Gilmer et al. (2017): messages along edges, summed, averaged and maximised per node."""

    nodes = 12

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.message = nn.Sequential(nn.Linear(32, 24), nn.SiLU(), nn.Linear(24, 16))
        self.update = nn.Sequential(nn.Linear(48, 24), nn.SiLU(), nn.Linear(24, 16))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Map features [12, 5] and edges [E], [E] to [12, 2]."""
        x = self.embed(x)
        ones = torch.ones_like(x[source][:, :1])
        degree = torch.zeros_like(x[:, :1]).index_add(0, target, ones).clamp(min=1)
        for _ in range(2):
            message = self.message(torch.cat((x[source], x[target]), 1))
            total = torch.zeros_like(x).index_add(0, target, message)
            index = target[:, None].expand_as(message)
            largest = torch.full_like(x, -3.0).scatter_reduce(0, index, message, "amax")
            x = x + self.update(torch.cat((x, total / degree, largest), 1))
        output: Tensor = self.head(x)
        return output


class EmbeddingBag(nn.Module):
    """A recommender: bags of looked-up rows, their products with the rows of each candidate, and a gated choice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.items = nn.Parameter(torch.randn(30, 12))
        self.weight = nn.Embedding(50, 1)
        self.gate = nn.Linear(6, 12)

    def forward(self, words: Tensor, candidates: Tensor, x: Tensor) -> Tensor:
        """Map word ids [N, T], candidates [N, K] and features [N, 6] to scores [N, K], the best first."""
        weight = self.weight(words).squeeze(-1).masked_fill(words == 3, -1e9).softmax(1)
        bag = (self.words(words) * weight[..., None]).sum(1)
        bag = functional.normalize(bag, dim=1) * self.gate(x).sigmoid()
        rows = self.items.index_select(0, candidates.flatten()).unflatten(0, candidates.shape)
        scores = (rows * bag[:, None]).sum(-1)
        best, order = scores.topk(3, 1)
        return best + torch.gather(self.items.norm(dim=1)[candidates], 1, order)


class RotaryDecoder(nn.Module):
    """A decoder whose norm, rotation and attention stay one operator each from opset 23 on."""

    heads, groups, size = 4, 2, 8

    def __init__(self) -> None:
        super().__init__()
        width = self.heads * self.size
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, self.groups * self.size, bias=False)
        self.value = nn.Linear(width, self.groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 48, bias=False), nn.Linear(width, 48, bias=False)
        self.down = nn.Linear(48, width, bias=False)
        angles = torch.arange(16)[:, None] / 10.0 ** torch.arange(self.size // 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Turn pairs of channels of [N, H, T, D] by the angles of their position; autograd has no rule for the operator."""
        if torch.onnx.is_in_onnx_export():
            rotated: Tensor = torch.onnx.ops.rotary_embedding(x, self.cos, self.sin, position)
            return rotated
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        real, imaginary = x.chunk(2, -1)
        return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """Map [N, T, 32] and positions [N, T] to [N, T, 32]."""
        y = self.norm1(x)
        query, key, value = (
            layer(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = self.rotate(query, position), self.rotate(key, position)
        read = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        output: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return output


class Recurrent(nn.Module):
    """Two layers of LSTM or GRU over a sequence, and a linear layer on the last state."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.cells = cell(5, 6, num_layers=2)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, N, 5] to [N, 3]."""
        output: Tensor = self.out(self.cells(x)[0][-1])
        return output
