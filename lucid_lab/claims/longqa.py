"""§4.4: questions about long documents (LongBench, SCROLLS).

The paper (table "LongBench and SCROLLS"): LUCID 0.274 / 0.086 / 0.144 F1 on 2WikiMQA, HotpotQA and MultifieldQA, 10.55
on Qasper, ROUGE-1 14.79 and ROUGE-L 12.60 on QMSum; standard attention 0.240 / 0.073 / 0.113, 7.69, 11.79, 10.39.

These data have to be downloaded. The small scale asks a stand-in: what does a function of Python's standard library do,
given a list of functions with the first lines of their docstrings? Prompts, splits and metrics are those of SCROLLS: F1
as for Qasper, ROUGE as for QMSum. No function of the evaluation is in the training data.
"""

from .engine.full_scale import cell_text
from .engine.jobs import Job
from .engine.result import Claim, Conclusion, Figure, Spread, Table, bar, bars, table
from .engine.scale import Scale
from .engine.steps import Step, evaluate, tune, tuned, unique
from .engine.study import Done
from .engine.verdict import Lead, Measured, PaperNumber, Place, Verdict, judge_leads, lead
from .text.comparison import ARMS, LOSS, Comparison, judge
from .text.training import TextRun

CLAIM = Claim(
    title="Questions about long documents are answered better",
    section="4.4",
    says="Fine-tuned on LongBench and SCROLLS, LUCID and LUCID-PaTH answer questions about long documents better than "
    "standard attention and most others.",
    paper="LUCID against standard: 2WikiMQA 0.274 / 0.240, HotpotQA 0.086 / 0.073, MultifieldQA 0.144 / 0.113, Qasper "
    "10.55 / 7.69, QMSum ROUGE-1 14.79 / 11.79, ROUGE-L 12.60 / 10.39",
)
PAPER = {
    "softmax": ("Standard", (0.240, 0.073, 0.113, 7.69, 11.79, 10.39)),
    "diff": ("Diff", (0.263, 0.081, 0.139, 8.70, 13.19, 11.07)),
    "delta": ("DeltaNet", (0.036, 0.019, 0.076, 7.06, 10.74, 8.72)),
    "gla": ("GLA", (0.228, 0.045, 0.114, 8.17, 10.97, 9.20)),
    "gsa": ("GSA", (0.232, 0.051, 0.116, 7.54, 9.11, 7.81)),
    "path": ("PaTH", (0.283, 0.079, 0.139, 10.57, 14.62, 12.00)),
    "lucid": ("LUCID", (0.274, 0.086, 0.144, 10.55, 14.79, 12.60)),
    "lucid_path": ("LUCID-PaTH", (0.275, 0.085, 0.149, 11.70, 14.83, 12.57)),
}
COLUMNS = ("2WikiMQA", "HotpotQA", "MultifieldQA", "Qasper", "QMSum R-1", "QMSum R-L")
# Our numbers of the columns: the recipe, what is measured, and the task.
COLUMN_PLACES = (
    ("longbench", "longbench", "2wikimqa"),
    ("longbench", "longbench", "hotpotqa"),
    ("longbench", "longbench", "multifieldqa_en"),
    ("qasper", "scrolls", "qasper"),
    ("qmsum", "scrolls", "qmsum"),
    ("qmsum", "scrolls rougeL", "qmsum"),
)
# Table 4 in percent: the paper has LongBench from 0 to 1, SCROLLS from 0 to 100.
TABLE = {
    key: [
        PaperNumber(
            "Table 4",
            f"{name}, {column}",
            round(100 * value if what == "longbench" else value, 2),
            Place(f"{recipe}-{key}", what, cell_text(task=task)),
        )
        for column, value, (recipe, what, task) in zip(COLUMNS, values, COLUMN_PLACES, strict=True)
    ]
    for key, (name, values) in PAPER.items()
}
PAPER_NUMBERS = tuple(number for row in TABLE.values() for number in row)


def judge_paper(measured: Measured) -> Verdict:
    """LUCID and LUCID-PaTH are ahead of standard attention, relative to it, and LUCID-PaTH of the linear attentions.

    The paper's sentence on "four of six tasks" is not judged: its own table shows three of six columns.
    """

    def ahead(key: str, other: str) -> Lead:
        name = f"{PAPER[key][0]} − {PAPER[other][0]}, mean of six columns"
        return lead(name, TABLE[key], TABLE[other], measured, relative=True)

    columns = sum(
        measured[ours.place].value > measured[standard.place].value
        for ours, standard in zip(TABLE["lucid"], TABLE["softmax"], strict=True)
    )
    return judge_leads(
        [ahead("lucid", "softmax"), ahead("lucid_path", "softmax")],
        [ahead("lucid_path", linear) for linear in ("delta", "gla", "gsa")],
        {f"LUCID is ahead of Standard in every column (in {columns} of {len(COLUMNS)})": columns == len(COLUMNS)},
    )


METRICS = {"f1": "F1", "rouge1": "ROUGE-1", "rougeL": "ROUGE-L"}


def comparison(scale: Scale) -> Comparison:
    """The runs of a scale."""
    smoke = scale.tiny
    steps, batch = (2, 4) if smoke else (300, 8)
    base = TextRun(
        texts={
            "kind": "questions",
            "settings": {"functions": 4, "held_out": 2 if smoke else 60},
            "samples": 200 if smoke else steps * batch,
            "vocabulary": 1000,
        },
        asked={"tasks": ("scrolls",), "options": {"max_length": 192, "answer_tokens": 24}, "with_data": True},
        model={"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32} if smoke else {},
        sequence_length=192,
        steps=steps,
        batch=batch,
    )
    return Comparison(base, seeds=scale.seeds, milliseconds=(75, 100), equal_time=not smoke)


def plan(scale: Scale, done: Done) -> list[Job]:
    """Texts; then models."""
    return comparison(scale).plan(done)


def conclude(scale: Scale, done: Done) -> Conclusion:
    """The verdict rests on F1."""
    runs = comparison(scale)
    scores = {arm: runs.score(done, arm, "f1") for arm in runs.arms}
    # The same sentence for every question scores about 10; a random line of the text about 28.
    verdict, because = judge(scores, floor=15, ceiling=90, what="F1 of answers", unit="")
    ours = "; ".join(f"{ARMS[arm].title} {scores[arm]}" for arm in runs.arms)
    stand_in = "This is a stand-in for the paper's data sets, which have to be downloaded: it says nothing about them."
    return Conclusion(
        ours=f"stand-in, F1: {ours}",
        verdict=verdict,
        because=f"{because} {stand_in}",
        seeds=len(runs.seeds),
        figures=[_bars(runs, done), runs.learning_curves(done, "to answer about functions")],
        tables=[_table(runs, done), _paper_table()],
    )


def _bars(runs: Comparison, done: Done) -> Figure:
    groups = {
        name: [bar(ARMS[arm].title, ARMS[arm].role, runs.score(done, arm, metric)) for arm in runs.arms]
        for metric, name in METRICS.items()
    }
    note = "A stand-in: questions about functions of Python's standard library, not the paper's data."
    return bars("Answers about functions", "score, of 100", groups, range=(0, 100), note=note)


def _table(runs: Comparison, done: Done) -> Table:
    rows: list[list[str | Spread]] = [
        [ARMS[arm].title, *(runs.score(done, arm, metric) for metric in METRICS), runs.loss(done, arm)]
        for arm in runs.arms
    ]
    note = f"A stand-in. Of 100, mean ± standard deviation over seeds. {runs.time_note(done)}"
    return table(
        "Answers about functions of the standard library", ["attention", *METRICS.values(), LOSS], rows, note=note
    )


def _paper_table() -> Table:
    rows = [[name, *values] for name, values in PAPER.values()]
    note = "F1 of 1 for the first three, of 100 for Qasper; ROUGE of 100."
    return table("The paper's: 1B models, LongBench and SCROLLS", ["attention", *COLUMNS], rows, note=note)


def paper() -> list[Step]:
    """Every attention of the table: pretraining, long-context tuning, three tunings on answers, their evaluations."""
    suites = {"longbench": "longbench", "qasper": "scrolls", "qmsum": "scrolls"}
    files = {
        "longbench": "data/longbench.jsonl",
        "qasper": "data/qasper_train.jsonl",
        "qmsum": "data/qmsum_train.jsonl",
    }
    steps = [Step(("make-data", recipe, file)) for recipe, file in files.items()]
    for attention in PAPER:
        steps += tuned(attention)
        for recipe, suite in suites.items():
            last = f"runs/paper/{recipe}-{attention}"
            steps += [
                tune(recipe, f"runs/paper/finetune_64k-{attention}/model", last, f"--data={files[recipe]}"),
                evaluate(f"{last}/model", suite, f"results/paper/{recipe}-{attention}"),
            ]
    return unique(steps)
