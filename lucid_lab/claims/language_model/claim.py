"""Language modelling (A.5): LUCID's loss is lower, and more so with long contexts, small heads and no positions.

The paper: "At 4096 context length, LUCID improves training loss by 0.012 over the Transformer baseline after 80B
tokens. At 32,768 context length, the gain increases to 0.048"; "LUCID attention achieves a 0.1 improvement in
validation loss … for headsize 16"; "the loss difference between LUCID (2.42) and standard attention (2.54) increases to
0.12 when the RoPE is removed in sequence length 32k setting".

Here: the next character of the Python standard library. The learning rate and the size of the embeddings are chosen for
each side by its own sweep, because an untuned baseline can lose by its tuning alone. Softmax attention also gets the
time that LUCID takes.
"""

from collections.abc import Mapping

from ..engine.full_scale import LOSS
from ..engine.jobs import Job
from ..engine.result import Claim, Conclusion, Spread
from ..engine.scale import Scale
from ..engine.steps import Step, evaluate, tokenized, train
from ..engine.study import Done
from ..engine.verdict import Lead, Measured, PaperNumber, Place, Verdict, judge_leads
from .figures import TIME_BAR, clear, described, figures, gap, tables
from .runs import SIDES, choose, decoder_timing, position_jobs, setting_jobs, sweep_jobs

CLAIM = Claim(
    title="A lower loss of language models",
    section="A.5",
    says="At the same number of steps LUCID reaches a lower loss than softmax attention; the gain grows with the "
    "context length, with heads of 16 instead of 64, and without RoPE.",
    paper="lower by 0.012 at 4096 tokens, 0.048 at 32 768, 0.1 with heads of 16 (4096), 0.12 without RoPE (32 768)",
)
VARIATIONS = {
    "no_positions": "without RoPE",
    "one_wide_head": "with one wide head",
    "long_context": "with the longer context",
}


def judge(gaps: Mapping[str, Spread]) -> tuple[str, str]:
    """The verdict and its reason. gaps: softmax loss minus LUCID's loss, by setting.

    Against the tuned baseline LUCID must be ahead by more than the spread over seeds, at equal steps and at equal time.
    """
    better_variations = [words for name, words in VARIATIONS.items() if clear(gaps[name])]
    equal_steps, equal_time = clear(gaps["tuned"]), clear(gaps["equal_time"])
    if equal_steps and equal_time:
        return "holds", "Against a tuned baseline LUCID's loss is lower at equal steps and at equal time."
    if equal_steps:
        return "partly", "Against a tuned baseline LUCID's loss is lower at equal steps, and not at equal time."
    if better_variations:
        variations_text = f"It is {', '.join(better_variations)}, at equal steps."
        return (
            "partly",
            f"Against a tuned baseline LUCID's loss is not lower by more than the spread. {variations_text}",
        )
    untuned = " With untuned embeddings it is: LUCID minds them less." if clear(gaps["untuned"]) else ""
    return "does not hold", f"Against a tuned baseline LUCID's loss is lower in no setting.{untuned}"


def plan(scale: Scale, done: Done) -> list[Job]:
    """The sweeps and times; then every setting with the tuned values; then the loss by position."""
    first = sweep_jobs(scale)
    if not all(job in done for job in first):
        return first
    choice = choose(scale, done)
    second = setting_jobs(choice)
    if not all(job in done for job in second):
        return [*first, *second]
    return [*first, *second, *position_jobs(choice)]


def conclude(scale: Scale, done: Done) -> Conclusion:
    """LUCID's lead in every setting, and where it grows."""
    choice = choose(scale, done)
    gaps = {name: gap(choice, name, done) for name in ("tuned", "equal_time", "untuned", *VARIATIONS)}
    verdict, reason = judge(gaps)
    ratio = done[decoder_timing(scale)]["ratio"]
    softmax, lucid = (described(choice.tuned[side]) for side in SIDES)
    tuned = softmax if softmax == lucid else f"softmax {softmax}, LUCID {lucid}"
    time = f"A step at 512 tokens and width 256 takes {ratio:.2f} times as long (at most {TIME_BAR})."
    return Conclusion(
        ours=f"LUCID minus softmax, both tuned: {minus(gaps['tuned'])} at equal steps, {minus(gaps['equal_time'])} at "
        f"equal time; without RoPE {minus(gaps['no_positions'])} (nats)",
        verdict=verdict,
        because=f"{reason} {trends(gaps)} Tuned: {tuned}. {time}",
        seeds=len(scale.seeds),
        figures=figures(choice, done),
        tables=tables(choice, done),
    )


def minus(gap: Spread) -> str:
    """LUCID's loss minus that of softmax attention: below zero is better."""
    return f"{-gap.mean:+.3f} ± {gap.std:.3f}"


def trends(gaps: Mapping[str, Spread]) -> str:
    """Where LUCID's lead grows as the paper says, by more than the spread of either gap."""
    pairs = {
        "without RoPE": ("no_positions", "tuned"),
        "with the longer context": ("long_context", "tuned"),
        "with small heads": ("tuned", "one_wide_head"),
    }
    grows: list[str] = []
    unclear: list[str] = []
    for words, (larger, smaller) in pairs.items():
        margin = max(gaps[larger].std, gaps[smaller].std)
        (grows if gaps[larger].mean - gaps[smaller].mean > margin else unclear).append(words)
    sentences = [f"The difference grows {', '.join(grows)}."] if grows else []
    sentences += [f"It does not clearly grow {', '.join(unclear)}."] if unclear else []
    return " ".join(sentences)


# The paper's model for longer contexts has a vocabulary of 256 000; the paper does not say which one.
# A.5: 80 000 steps of a million tokens, none of which is seen twice.
TOKENS, VOCABULARY, TOKEN_COUNT = "data/dolma-256k", 256_000, 84_000_000_000
HEADS_OF_16 = ("model.num_attention_heads=128", "model.num_key_value_heads=128", "model.head_dim=16")


def paper() -> list[Step]:
    """Two lengths, heads of 16 at the shorter one, no RoPE at the longer one; then the loss by position."""
    steps = [tokenized(TOKENS, VOCABULARY, TOKEN_COUNT)]
    runs: list[tuple[str, str, tuple[str, ...], int]] = [
        ("context_4k", "", (), 4096),
        ("context_32k", "", (), 32_768),
        ("context_4k", "-heads_of_16", HEADS_OF_16, 4096),
        ("context_32k", "-no_rope", ("model.rope_theta=None",), 32_768),
    ]
    for recipe, name, changes, length in runs:
        for side in SIDES:
            out = f"runs/paper/{recipe}{name}-{side}"
            words = [word for change in changes for word in ("--set", change)]
            steps.append(train(recipe, side, "--data", TOKENS, *words, out=out))
            text = ("--text", TOKENS, "--lengths", str(length), "--samples", "500")
            steps.append(evaluate(f"{out}/model", "perplexity", f"{out}-perplexity", *text))
    return steps


# A.5: the run, and by how much LUCID's loss is lower.
GAINS = {
    "context_4k": ("4096 tokens", 0.012),
    "context_32k": ("32 768 tokens", 0.048),
    "context_4k-heads_of_16": ("heads of 16, 4096 tokens", 0.1),
    "context_32k-no_rope": ("no RoPE, 32 768 tokens", 0.12),
}
# The losses that the paper gives.
LOSSES = {("context_32k-no_rope", "softmax"): 2.54, ("context_32k-no_rope", "lucid"): 2.42}
AT_END = {
    (run, side): PaperNumber(
        "A.5" if "-" in run else "Figure 7",
        f"loss, {words}, {side}",
        LOSSES.get((run, side)),
        Place(f"{run}-{side}", LOSS),
    )
    for run, (words, _) in GAINS.items()
    for side in SIDES
}
PAPER_NUMBERS = tuple(AT_END.values())


def judge_paper(measured: Measured) -> Verdict:
    """LUCID's loss is lower in all four settings, and by more in the longer context."""
    leads = []
    for run, (words, paper_gain) in GAINS.items():
        softmax, lucid = (measured[AT_END[run, side].place].value for side in SIDES)
        leads.append(Lead("A.5", f"loss lower, {words}", paper_gain, softmax - lucid, unit="nats"))
    short, long = leads[:2]
    return judge_leads(leads, conditions={"the gain grows from 4096 to 32 768 tokens": long.ours > short.ours})
