"""Cost of the operator (§2.1, §2.3): LUCID stays in the cost class of softmax attention.

The paper: "LUCID … retains O(N²d) complexity like standard softmax attention". The solve of a key/value head costs the
operations of one more head of attention, so the FLOP ratio is 1 + H_kv/H.
"""

from collections.abc import Sequence

from .engine.jobs import Job
from .engine.result import Claim, Conclusion, table
from .engine.scale import QUICK, SMALL, SMOKE, Scale
from .engine.steps import Step, at_small_scale
from .engine.study import Done
from .engine.timing import cost_figure, cost_job
from .engine.verdict import as_at_small_scale

CLAIM = Claim(
    title="The cost class of softmax attention",
    section="A.4",
    says="LUCID retains O(N²d) complexity like standard softmax attention, and grouped key/value heads make its share "
    "small.",
    paper="O(N²d), no ratio given for the operator",
)
PAPER_NUMBERS, judge_paper = as_at_small_scale("operator_cost")
# The claim holds up to this multiple of the FLOP ratio.
ALLOWED = 1.15
SHAPES = ((8, 8), (32, 4))


def cases(scale: Scale) -> list[tuple[str, Job]]:
    """Shapes and passes, with their jobs."""
    lengths: Sequence[int] = (512, 1024, 2048, 4096)
    if scale != SMALL:
        lengths = (64, 128) if scale.tiny else (512, 1024) if scale == QUICK else (512, 1024, 2048)
    named_jobs = []
    for heads, kv_heads in SHAPES:
        for backward in (False, True):
            if backward and scale in (SMOKE, QUICK):
                continue
            name = f"{heads}/{kv_heads} heads of 64, {'forward and backward' if backward else 'forward'}"
            job = cost_job(lengths, heads, kv_heads, 64, backward, f"cost, {name}", quick=scale.tiny)
            named_jobs.append((name, job))
    return named_jobs


def plan(scale: Scale, done: Done) -> list[Job]:
    """The timings. They run one after another."""
    return [job for _, job in cases(scale)]


def conclude(scale: Scale, done: Done) -> Conclusion:
    """Compare the ratios at the longest length with the FLOP ratio."""
    records = {name: done[job] for name, job in cases(scale)}
    rows, within = [], []
    for name, record in records.items():
        ratios = [round(ratio, 2) for ratio in record["ratio"]]
        rows.append([name, round(record["flop_ratio"], 3), *ratios])
        within.append(record["ratio"][-1] <= ALLOWED * record["flop_ratio"])
    longest = next(iter(records.values()))["lengths"][-1]
    ours = "; ".join(f"{name}: {record['ratio'][-1]:.2f} ×" for name, record in records.items())
    verdict = "holds" if all(within) else "partly" if any(within) else "does not hold"
    lengths = next(iter(records.values()))["lengths"]
    return Conclusion(
        ours=f"{ours} (N = {longest}, over SDPA)",
        verdict="too small to judge" if scale.tiny else verdict,
        because=f"Time over that of torch's SDPA at N = {longest}, in turn on one thread: {ours}. The count of "
        f"operations allows 1 + H_kv/H; up to {ALLOWED:.2f} times that counts as holding.",
        seeds=1,
        figures=[cost_figure(record, name) for name, record in records.items()],
        tables=[table("Time over that of SDPA", ["", "FLOP ratio", *(f"N = {n}" for n in lengths)], rows)],
    )


def paper() -> list[Step]:
    """The same measurement on the cluster."""
    return [at_small_scale("operator_cost")]
