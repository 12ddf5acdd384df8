"""For every attention: a short training run learns to copy."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .contract import ATTENTIONS, every_name

LENGTH, SYMBOLS, WIDTH = 5, 6, 32


class Copier(nn.Module):
    """Reads LENGTH symbols and as many blanks, and names at the i-th blank the i-th symbol."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(SYMBOLS + 1, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.norm, self.attention = nn.RMSNorm(WIDTH), ATTENTIONS[name](WIDTH, 2)
        self.name = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.symbol(tokens) + self.place.weight)
        return self.name(self.attention(x)[0][:, LENGTH:])


@every_name
def test_a_short_training_run_learns_to_copy(name: str) -> None:
    torch.manual_seed(0)
    model = Copier(name)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(120):
        symbols = torch.randint(SYMBOLS, (32, LENGTH))
        tokens = torch.cat([symbols, torch.full_like(symbols, SYMBOLS)], 1)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), symbols.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5
    assert sum(losses[-10:]) / 10 < 0.3 * losses[0]
