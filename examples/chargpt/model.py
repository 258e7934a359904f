"""A character-level GPT of a few hundred thousand parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    block_size: int
    layers: int
    heads: int
    width: int


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.mix = nn.Linear(shape.width, shape.width)
        self.before_feed = nn.LayerNorm(shape.width)
        self.feed = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).split(width, dim=2)
        parts = [t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v)]
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = x + self.feed(self.before_feed(x))
        return fed


class CharGpt(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.block_size, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over all positions."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.token(tokens) + self.position(places))
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
