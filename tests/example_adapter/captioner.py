import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def split(self, x):  # (B, n, C) -> (B, H, n, D)
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, frames=None):
        y = x if frames is None else frames
        q, k, v = self.split(self.q(x)), self.split(self.k(y)), self.split(self.v(y))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=frames is None).transpose(1, 2).flatten(2))


class Captioner(nn.Module):
    """Token ids (B, L) and a video for each, (B, F, patches, pixels) -> logits, or the loss when there are labels."""

    def __init__(self, words=64, pixels=12, width=32, layers=2, longest=512):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.tower, self.head = nn.Linear(pixels, width), nn.Linear(width, words)
        self.read, self.look = (nn.ModuleList(Attention(width) for _ in range(layers)) for _ in range(2))

    def forward(self, ids, video, labels=None):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        frames = self.tower(video).flatten(1, 2)
        for read, look in zip(self.read, self.look, strict=True):
            x = x + read(x)
            x = x + look(x, frames)
        logits = self.head(x)
        return logits if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
