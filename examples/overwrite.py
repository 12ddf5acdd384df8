"""What LUCID does, in less than a minute: the latest value of a repeated key wins.

Every token of a sequence writes a value under one of a few keys, over and over; at the end each key is asked for its
latest value. Softmax attention averages all values that were ever written under a key. LUCID stores corrections
(y = P⁻¹v), so the newest value replaces the old ones. One layer of each is trained on the same data, with and without
rotary positions, and one picture shows P, the weights on the values, and the accuracy.

    python examples/overwrite.py [--steps 400] [--out overwrite.png]
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lucid_attention import LucidAttention, lucid_attention, preconditioner
from lucid_attention.nn.causal import CausalAttention

KEYS, VALUES, WRITES = 8, 32, 56
WIDTH, HEADS, BATCH = 64, 4, 16


@dataclass
class Contestant:
    name: str
    attention: type[CausalAttention]
    rope_base: float | None
    steps: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


def overwrites(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """keys: [batch, WRITES + KEYS], the last KEYS are questions; values: [batch, WRITES]; answers: [batch, KEYS]."""
    keys = torch.randint(KEYS, (batch, WRITES), generator=generator)
    # Every key is written at least once.
    keys[:, :KEYS] = torch.stack([torch.randperm(KEYS, generator=generator) for _ in range(batch)])
    values = torch.randint(VALUES, (batch, WRITES), generator=generator)
    questions = torch.stack([torch.randperm(KEYS, generator=generator) for _ in range(batch)])
    position = torch.arange(WRITES).expand(batch, WRITES)
    latest = torch.where(keys[:, None] == questions[:, :, None], position[:, None], -1).amax(-1)
    return torch.cat([keys, questions], 1), values, values.gather(1, latest)


class OneLayer(nn.Module):
    """Embedding, one attention layer, output. A write carries its key and value in one token."""

    def __init__(self, attention: type[CausalAttention], rope_base: float | None) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(KEYS, WIDTH), nn.Embedding(VALUES + 1, WIDTH)
        self.attention = attention(WIDTH, HEADS, rope_base=rope_base)
        self.out = nn.Linear(WIDTH, VALUES)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        question = torch.full_like(keys[:, WRITES:], VALUES)
        x = self.key(keys) + self.value(torch.cat([values, question], 1))
        o, _ = self.attention(F.rms_norm(x, (WIDTH,)))
        return self.out(F.rms_norm(o[:, WRITES:], (WIDTH,)))


def train(contestant: Contestant, steps: int) -> None:
    torch.manual_seed(0)
    model = OneLayer(contestant.attention, contestant.rope_base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1, pct_start=0.1)
    data = torch.Generator().manual_seed(1)
    test = overwrites(256, torch.Generator().manual_seed(2))
    started = time.perf_counter()
    for step in range(steps + 1):
        if step % max(1, steps // 8) == 0 or step == steps:
            with torch.no_grad():
                right = (model(*test[:2]).argmax(-1) == test[2]).double().mean().item()
            contestant.steps.append(step)
            contestant.accuracy.append(100 * right)
            if sys.stdout.isatty() or step == steps:
                line = f"  {contestant.name:24s} step {step:4d}/{steps}  accuracy {100 * right:5.1f} %"
                print("\r" + line, end="", flush=True)
        keys, values, answers = overwrites(BATCH, data)
        loss = F.cross_entropy(model(keys, values).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"  ({time.perf_counter() - started:.0f} s)")


def weights_on_values() -> tuple[Tensor, Tensor, Tensor]:
    """P, and the weight of every value in softmax and in LUCID, for three keys written six times each and asked for."""
    torch.manual_seed(3)
    directions = F.normalize(torch.randn(3, 16), dim=-1) * 4
    k = directions.repeat(6, 1)
    softmax = (1.5 * directions @ k.T / 4).softmax(-1)
    # With the identity as values the output is the weights. The last of T positions sees every key.
    q = 1.5 * directions[:, None, None].expand(3, 1, len(k), 16)
    identity = torch.eye(len(k)).expand(3, 1, -1, -1)
    lucid = lucid_attention(q, k.expand(3, 1, -1, -1), identity)[:, 0, -1]
    return preconditioner(k[None, None])[0, 0], softmax, lucid


def draw(contestants: list[Contestant], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    P, softmax, lucid = weights_on_values()
    figure, axes = plt.subplots(1, 4, figsize=(16, 3.8), width_ratios=[1, 1.2, 1.2, 1.5], layout="constrained")
    axes[0].imshow(P, cmap="viridis", vmin=0, vmax=1)
    axes[0].set_title("P: three keys, written in turn")
    axes[0].set_xlabel("earlier key")
    axes[0].set_ylabel("key")
    axes[0].set_xticks([0, 5, 10, 15])
    axes[0].set_yticks([0, 5, 10, 15])
    for axis, weights, name in ((axes[1], softmax, "softmax"), (axes[2], lucid, "LUCID")):
        image = axis.imshow(weights, cmap="RdBu", vmin=-0.3, vmax=0.3, aspect="auto")
        axis.set_title(f"{name}: weight of each value")
        axis.set_xlabel("written at")
        axis.set_yticks(range(3), [f"key {i}?" for i in range(3)])
        figure.colorbar(image, ax=axis, shrink=0.8)
    for contestant in contestants:
        lucid_one = contestant.attention is LucidAttention
        axes[3].plot(
            contestant.steps,
            contestant.accuracy,
            label=contestant.name,
            color="tab:blue" if lucid_one else "tab:orange",
            linestyle="-" if contestant.rope_base is None else "--",
            marker="o",
            markersize=3,
        )
    axes[3].set_ylim(0, 103)
    axes[3].set_title("latest value of a repeated key")
    axes[3].set_xlabel("training step")
    axes[3].set_ylabel("accuracy, %")
    axes[3].legend()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps of each model (default 400)")
    parser.add_argument("--out", type=Path, default=Path("overwrite.png"), help="the picture (default overwrite.png)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    options.out.parent.mkdir(parents=True, exist_ok=True)

    print(f"{WRITES} writes to {KEYS} keys, then every key is asked for its latest value ({VALUES} values):")
    contestants = [
        Contestant("softmax, no positions", CausalAttention, None),
        Contestant("LUCID, no positions", LucidAttention, None),
        Contestant("softmax, rotary", CausalAttention, 10_000.0),
        Contestant("LUCID, rotary", LucidAttention, 10_000.0),
    ]
    for contestant in contestants:
        train(contestant, options.steps)
    draw(contestants, options.out)
    print(f"chance is {100 / VALUES:.1f} %; picture: {options.out}")


if __name__ == "__main__":
    main()
