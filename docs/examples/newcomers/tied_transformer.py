"""A small transformer whose output layer is its embedding: which of the sequences are worth
training on?
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hgms.adapters import from_module
from hgms.comparison import compare


class Transformer(nn.Module):
    def __init__(self, words=8, width=8):
        super().__init__()
        self.embed, self.out = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.out.weight = self.embed.weight  # tied: one variable

    def forward(self, tokens):
        return self.out(self.layer(self.embed(tokens)))


def loss(model, batch):  # a loss a sequence
    return cross_entropy(model(batch["tokens"]).mT, batch["next"], reduction="none").mean(1)


tokens = torch.randint(8, (80, 6), generator=torch.Generator().manual_seed(0))
# the first 20 obey another rule
after = torch.where(torch.arange(80)[:, None] < 20, tokens.flip(1), (tokens + 1) % 8)
train = {"tokens": tokens[:40], "next": after[:40]}
validation = {"tokens": tokens[40:], "next": after[40:]}
model = Transformer()
problem = from_module(model, loss, train, validation)
comparison = compare(problem, ["uniform", "hg-implicit"], budget="2 steps", seeds=2)
print(comparison)
