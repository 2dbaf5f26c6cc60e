"""The demonstration's model and text: a byte-level transformer, and the sources of Python's
standard library.

Small enough for four ranks on two cores, yet realistic: with dropout a resumed run needs its random
generators back, and AdamW's state is twice the size of the weights.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from milepost.errors import UsageError

VOCABULARY: Final = 256
CONTEXT: Final = 64
WIDTH: Final = 256
LAYERS: Final = 2
HEADS: Final = 4
DROPOUT: Final = 0.1

TEXT_BYTES_MAX: Final = 4 * 2**20
TEXT_BYTES_MIN: Final = 2**16


def read_text() -> Tensor:
    """Return the text of the standard library's top-level modules, in the order of their names, as
    one tensor of uint8.

    Raises UsageError if the library is installed without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES_MAX:
            break
    if len(text) < TEXT_BYTES_MIN:
        raise UsageError(
            "usage",
            f"{folder} holds {len(text)} bytes of Python source, fewer than {TEXT_BYTES_MIN}",
            "the demonstration trains on the standard library's sources; use a Python with them",
        )
    return torch.frombuffer(text[:TEXT_BYTES_MAX], dtype=torch.uint8)


class Block(nn.Module):
    """Attention, then feed-forward; each input is normalised first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.forward_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map batch x positions x width to the same shape."""
        batch, positions, _ = x.shape
        parts = self.heads(self.attention_norm(x)).view(batch, positions, 3, HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        seen = seen.transpose(1, 2).reshape(batch, positions, WIDTH)
        x = x + functional.dropout(self.mix(seen), DROPOUT, self.training)
        wide = functional.gelu(self.widen(self.forward_norm(x)))
        return x + functional.dropout(self.narrow(wide), DROPOUT, self.training)


class LanguageModel(nn.Module):
    """Predicts each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats a byte; both arguments are batch x positions of int64."""
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TextSampler:
    """Draws random pieces of the text.

    Attributes:
        generator: its whole state.
    """

    def __init__(self, text: Tensor, batch: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._text = text
        self._batch = batch

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return inputs, and as targets the same pieces one byte later."""
        last = len(self._text) - CONTEXT - 1
        starts = torch.randint(last, (self._batch, 1), generator=self.generator)
        pieces = self._text[starts + torch.arange(CONTEXT + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]
