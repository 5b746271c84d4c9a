"""Real models that many tests share: a byte-level GPT, and an MLP with every odd parameter in it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout, self.training)
        return x


class GPT(nn.Module):
    """Learned positions, and a head tied to the embedding."""

    def __init__(
        self,
        vocab: int = 256,
        width: int = 32,
        layers: int = 2,
        heads: int = 4,
        context: int = 16,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocab, self.context = vocab, context
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @staticmethod
    def loss_fn(model: "GPT", batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def make_batch(self, seed: int, *, size: int = 2) -> dict[str, Tensor]:
        text = torch.randint(self.vocab, (size, self.context + 1), generator=torch.Generator().manual_seed(seed))
        return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


class Nothing(nn.Linear):
    """A linear without outputs."""

    def reset_parameters(self) -> None:
        """Nothing to initialise, and no warning about it."""


class OddMLP(nn.Module):
    """Every odd kind of parameter and buffer; `WIDTH` divides by no number of ranks that a test uses.

    Tied linears with their own biases, a submodule used twice, a 0-dim scale, a parameter of one element, a linear
    without outputs, a frozen and an unused parameter, BatchNorm, a buffer written in place and one that is re-assigned,
    bf16 beside fp32.
    """

    WIDTH = 5

    calls: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        width = self.WIDTH
        self.first = nn.Linear(width, width)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.first.weight
        self.twice = nn.Linear(width, width)
        self.nothing = Nothing(width, 0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(7))
        self.norm = nn.BatchNorm1d(width)
        self.low = nn.Linear(width, width).bfloat16()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.twice(torch.relu(self.twice(self.first(x))))
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        x = self.norm(x + self.frozen(x) + self.average)
        x = torch.cat([self.tied(x), self.nothing(x)], dim=1)
        x = self.low(x.bfloat16()).float()
        return x * self.scale.exp() + self.one

    @staticmethod
    def loss_fn(model: "OddMLP", batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor | int]]:
        x, y = batch
        out = model(x)
        return F.mse_loss(out, y), {"out": out, "calls": model.calls, "scale": model.scale, "fixed": 3}

    def make_batch(self, seed: int, *, size: int = 4) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(size, self.WIDTH, generator=generator) for _ in range(2)]
